"""Types that editors and type checkers see: results of class methods, and names that can be completed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from drivetrain.runtime import devices
from drivetrain.strategies import registry
from drivetrain.strategies.precision import registry as precisions

SCRIPT = """
from drivetrain import Accelerator, DataModule, Task, Trainer

class Mine(Task):
    width: int = 3

class Data(DataModule):
    pass

reveal_type(Mine.load_from_checkpoint("a.ckpt"))
reveal_type(Data.load_from_checkpoint("a.ckpt"))
Trainer(accelerator="gpu", strategy="fsdp", precision="bf16-mixed", limit_val_batches=[1, 0.5])
Trainer(accelerator="mine", strategy="mine", precision="mine", limit_test_batches={"a": 2})
Accelerator(mixed_precision="fp16", strategy="ddp")
Trainer(strategy=3)
"""


def test_a_type_checker_knows_classes_and_names(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = re.findall(r"script\.py:(\d+): (\w+): (.*)", ended.stdout)
    lines = {int(line): (kind, text) for line, kind, text in found}
    assert lines[10] == ("note", 'Revealed type is "script.Mine"'), ended.stdout + ended.stderr
    assert lines[11] == ("note", 'Revealed type is "script.Data"')
    [(line, (kind, text))] = [(line, each) for line, each in lines.items() if line > 11]
    assert (line, kind) == (15, "error")
    # The names stand in the message of the wrong type, as in an editor's list.
    assert "'ddp_spawn'" in text
    assert "'deepspeed_stage_3'" in text


def test_the_names_that_editors_complete_are_those_that_are_registered() -> None:
    # Other tests of this process may have registered more.
    known, names = set(registry.available_strategies()), set(get_args(registry.StrategyName))
    assert names <= known
    assert not [name for name in known - names if name.startswith(("ddp", *registry._CLASSES))]
    assert set(get_args(precisions.PrecisionName)) <= set(precisions._PRECISIONS)
    assert set(get_args(devices.DeviceName)) == {"auto"} | (set(devices._KINDS) - devices.ADDED)
