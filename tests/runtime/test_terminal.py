"""What is written for people never ends a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.runtime.terminal import print_text, visible

SCRIPT = """
import sys
from torch import nn, optim, randn
from torch.utils.data import DataLoader
from drivetrain import Task, Trainer

class Line(Task):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        self.print("step ä", batch_idx)
        return self.layer(batch).mean()
    def test_step(self, batch, batch_idx):
        self.log("ä", self.layer(batch).mean())
    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(randn(4, 2), batch_size=2)
trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir="ä", profiler="simple")
trainer.fit(Line(), data)
trainer.test(Line(), data)
sys.stderr.write(f"{trainer.global_step} steps")
"""
OUTPUTS = {
    "closed": "exec >&-; {}",
    "a pipe that nobody reads": "{} | true; exit ${{PIPESTATUS[0]}}",
    "a full disk": "{} > /dev/full",
    "an encoding without the characters": "PYTHONIOENCODING=ascii {} > /dev/null",
}


@pytest.mark.parametrize("command", OUTPUTS.values(), ids=OUTPUTS)
def test_a_run_trains_and_ends_well_whatever_its_output_is(command: str, tmp_path: Path) -> None:
    Path(tmp_path, "train.py").write_text(SCRIPT, encoding="utf-8")
    line = command.format(f"{sys.executable} train.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr[-7:]) == (0, "2 steps"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
@pytest.mark.parametrize("output", ["a full disk", "an encoding without the characters"])
def test_neither_do_the_bars_of_the_mirror_end_a_run(output: str, bar: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("from drivetrain import Task, Trainer", "import drivetrain.compat.lightning.pytorch as pl")
    script = script.replace("(Task)", "(pl.LightningModule)").replace(
        "Trainer(", f"pl.Trainer(callbacks=[pl.callbacks.{bar}()], "
    )
    Path(tmp_path, "train.py").write_text(script, encoding="utf-8")
    line = OUTPUTS[output].format(f"{sys.executable} train.py")
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr[-7:]) == (0, "2 steps"), done.stderr


class Copies:
    """A stream as people put it in the place of stdout, to keep what is printed in a file as well."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.kept = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.kept += text
        self.stream.write(text)
        return len(text)


def test_a_stream_that_copies_what_is_printed_receives_the_text(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(sys.stdout)
    monkeypatch.setattr(sys, "stdout", copies)
    print_text("written")
    replaced: list[str] = []
    monkeypatch.setattr(copies.stream, "write", replaced.append)
    print_text("once more")
    monkeypatch.undo()
    assert (copies.kept, replaced, capfd.readouterr().out) == ("written\nonce more\n", ["once more\n"], "written\n")


def test_what_is_written_reaches_the_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", end=" ")
    print_text("ä", end=" after\n")
    assert capfd.readouterr().out == "before ä after\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\tä\n", "plain\tä\n"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\x9bb", "a\\x9bb"),
        ("a\u202eb", "a\\u202eb"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_control_characters_are_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown
