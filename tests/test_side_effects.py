"""Importing the package, making its objects, training and failing leave the process and the user's optimizer alone."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'drivetrain'}{os.sep}"


# This module is also what the processes below run, so it imports drivetrain in functions only.


def code_of_ours(call: Callable[[], object]) -> bool:
    """Whether a call runs any code of the package."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return bool(found)


def state_of_the_process() -> dict[str, Any]:
    """Everything that a library could change about a process, in a form that can be compared."""
    images, weight = torch.ones(2, 16, 32, 32), torch.ones(4, 16, 3, 3)
    operations = {
        "max_pool2d": lambda: F.max_pool2d(images, 2),
        "avg_pool2d": lambda: F.avg_pool2d(images, 2),
        "conv2d": lambda: F.conv2d(images, weight),
        "linear": lambda: F.linear(images, torch.ones(4, 32)),
    }
    return {
        "kernels": [name for name, call in operations.items() if code_of_ours(call)],
        "hooks": [sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook],
        "tracing": [sys.gettrace(), sys.getprofile(), sys.getswitchinterval(), sys.getrecursionlimit()],
        "environment": dict(os.environ),
        "python's generator": random.getstate(),
        "numpy's generator": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "torch's generator": torch.get_rng_state().tolist(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks)],
        "warnings": [list(warnings.filters), warnings.showwarning],
        "logging": [list(logging.getLogger(name).handlers) for name in (None, "drivetrain")],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "priority": os.nice(0),
        "torch": [
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
        ],
    }


def do_imports() -> Any:
    import drivetrain

    return [getattr(drivetrain, name) for name in drivetrain.__all__]


def do_an_accelerator() -> Any:
    from drivetrain import Accelerator

    return Accelerator(cpu=True)


def do_a_trainer(**options: Any) -> Any:
    from drivetrain import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": "runs"}
    return Trainer(**{"max_epochs": 2, "accelerator": "cpu", **quiet, **options})


def do_a_caught_error() -> Any:
    from drivetrain import ConfigurationError

    with pytest.raises(ConfigurationError):
        do_a_trainer(max_epochs="ten")


def do_steps_with_an_accelerator() -> Any:
    accelerator = do_an_accelerator()
    model = line()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.ones(4, 2)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("state")
    accelerator.save_state("state later", block=False)
    accelerator.load_state("state")
    accelerator.free_memory()


def do_a_run(**options: Any) -> Any:
    do_a_trainer(**options).fit(make_task(), [torch.ones(4, 2)] * 4, [torch.ones(4, 2)])


def do_a_run_that_fails() -> Any:
    task = make_task()
    task.fails = True
    with pytest.raises(ValueError, match="in the user's step"):
        do_a_trainer().fit(task, [torch.ones(4, 2)] * 4)


def line() -> nn.Module:
    """A model that is made without drawing."""
    model = nn.Linear(2, 1, device="meta").to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def make_task(make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    from drivetrain import Task

    class Line(Task):
        fails = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = line()
            self.optimizer = make_optimizer(self.parameters())

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.fails:
                raise ValueError("in the user's step")
            return self.layer(batch).square().mean()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("loss", self.layer(batch).mean())

        def configure_optimizers(self) -> Any:
            return self.optimizer

    return Line()


STAGES: dict[str, Callable[[], Any]] = {
    "import": do_imports,
    "Accelerator()": do_an_accelerator,
    "Trainer()": do_a_trainer,
    "a caught error": do_a_caught_error,
    "steps with an Accelerator": do_steps_with_an_accelerator,
    "fit": do_a_run,
    "fit in bf16": lambda: do_a_run(precision="bf16-mixed"),
    "fit with a logger": lambda: do_a_run(logger="csv", enable_progress_bar=True),
    "a fit that fails": do_a_run_that_fails,
}


def main() -> None:
    """Print what each stage has changed in this process."""
    importing_torch_leaves_its_own()
    found: dict[str, list[str]] = {}
    before = state_of_the_process()
    for name, run in STAGES.items():
        made = run()
        after = state_of_the_process()
        found[name] = [part for part in before if before[part] != after[part]]
        before = after
        del made
    sys.stderr.flush()
    print(f"\nCHANGED {json.dumps(found)}")


def importing_torch_leaves_its_own() -> None:
    """Import what torch imports late, by itself, with filters, variables and threads of its own."""
    import torch._dynamo
    import torch._inductor.config
    import torch.distributed.tensor.parallel
    import torch.utils.data

    model = line()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def run_here(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment, timeout=200
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_nothing_changes_in_the_process(tmp_path: Path) -> None:
    shown = run_here("from tests.test_side_effects import main; main()", tmp_path)
    changed = json.loads(shown.split("CHANGED ")[-1])
    assert list(changed) == list(STAGES)
    assert {name: parts for name, parts in changed.items() if parts} == {}


FREED = """
import os, torch
{before}
kept = [torch.ones(6 << 20) for _ in range(64)]  # too large for the heap, as it comes
del kept
print(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a process's resident memory is in /proc")
def test_freed_memory_returns_to_the_system_as_in_plain_torch(tmp_path: Path) -> None:
    trains = "from tests.test_side_effects import do_a_run, do_an_accelerator as make\nmake()\ndo_a_run()"
    plain, trained = (int(run_here(FREED.format(before=before), tmp_path).splitlines()[-1]) for before in ("", trains))
    assert trained < plain + 300  # MiB, of 1,536 that were freed; the rest is code


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam, fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop, foreach": lambda parameters: torch.optim.RMSprop(parameters, foreach=True),
}


def shape_of(optimizer: torch.optim.Optimizer) -> Any:
    """What belongs to the user of an optimizer: its class, methods, attributes, hooks and the options of its groups."""
    values = vars(optimizer)
    hooks = {name: len(value) for name, value in values.items() if name.endswith("_hooks")}
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    parameters = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    methods = [getattr(type(optimizer), name) for name in ("step", "zero_grad", "add_param_group")]
    return type(optimizer), methods, sorted(values), hooks, options, parameters


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_accelerator_leaves_the_optimizer_as_it_was_made(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    accelerator, model = do_an_accelerator(), line()
    optimizer = make(model.parameters())
    before = shape_of(optimizer)
    model, prepared = accelerator.prepare(model, optimizer)
    assert prepared.optimizer is optimizer
    assert shape_of(optimizer) == before
    accelerator.backward(model(torch.ones(4, 2)).square().mean())
    prepared.step()
    prepared.zero_grad()
    assert shape_of(optimizer) == before


@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_run_leaves_the_optimizer_as_it_was_made(
    make: Callable[[Any], torch.optim.Optimizer], precision: str, tmp_path: Path
) -> None:
    task = make_task(make)
    before = shape_of(task.optimizer)
    trainer = do_a_trainer(precision=precision, max_steps=3, default_root_dir=tmp_path, enable_checkpointing=False)
    trainer.fit(task, [torch.ones(4, 2)] * 4)
    assert trainer.optimizers == [task.optimizer]
    assert shape_of(task.optimizer) == before


def do_an_accelerator_with(**options: Any) -> Any:
    from drivetrain import Accelerator

    return Accelerator(cpu=True, **options)


@pytest.mark.parametrize(
    "make", [lambda **given: do_a_trainer(**given).accelerator, do_an_accelerator_with], ids=["Trainer", "Accelerator"]
)
@pytest.mark.parametrize("value", [True, False])
def test_the_option_that_chose_an_implementation_warns_and_has_no_effect(make: Callable[..., Any], value: bool) -> None:
    from drivetrain import DrivetrainDeprecationWarning

    with pytest.warns(DrivetrainDeprecationWarning, match="give fused=True to the optimizer itself") as caught:
        accelerator = make(fused_optimizer=value)
    assert caught[0].filename == __file__
    model = line()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    assert optimizer.param_groups[0]["fused"] is None
