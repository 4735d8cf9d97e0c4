"""`drivetrain tune`: each trial is the script with one setting changed, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer


class Net(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def on_train_start(self):
        seen = (self.trainer.precision, self.trainer.world_size, self.trainer.gradient_clip_val, sys.argv[1:])
        if self.trainer.is_global_zero:
            with Path("seen").open("a") as file:
                print(*seen, sep="|", file=file)

    def training_step(self, batch, batch_idx):
        if sys.argv[1] == "raises" and self.trainer.precision != "32":
            raise RuntimeError("no kernel for bfloat16")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if sys.argv[1] == "breaks":
    raise ValueError("there is no data")
trainer = Trainer(max_epochs=3, max_steps=4, accelerator="cpu", compile=False, gradient_clip_val=0.5)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=2))
Path("trained").touch()
"""


def tune(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-m", "drivetrain", "tune", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_each_trial_is_the_script_with_one_change_and_nothing_is_left(tmp_path: Path) -> None:
    ended = tune(tmp_path, "train.py", "--lr", "0.1")
    assert ended.returncode == 0, ended.stderr
    header, as_it_is, *_ = ended.stdout.splitlines()
    assert header.split() == ["change", "a", "step", "speed"]
    assert re.match(r"as it is +\S+ m?s +1\.00x$", as_it_is)
    assert re.search(r"Trainer\(precision='bf16-mixed'\) +\S+ m?s +\S+x  Changes results", ended.stdout)
    seen = [line.split("|") for line in (tmp_path / "seen").read_text().splitlines()]
    assert {tuple(each[1:]) for each in seen} == {("1", "0.5", "['--lr', '0.1']")}
    assert {each[0] for each in seen} == {"32", "bf16"}
    assert {each.name for each in tmp_path.iterdir()} == {"train.py", "seen"}


def test_flags_of_the_launcher_start_processes_and_a_change_that_fails_is_named(tmp_path: Path) -> None:
    ended = tune(tmp_path, "--cpu", "--num_processes", "2", "train.py", "raises")
    assert ended.returncode == 0, ended.stderr
    assert {line.split("|")[1] for line in (tmp_path / "seen").read_text().splitlines()} == {"2"}
    assert re.search(r"Trainer\(precision='bf16-mixed'\) +failed +RuntimeError: no kernel for bfloat16", ended.stdout)
    assert "No change makes steps faster." in ended.stdout or "helps most" in ended.stdout


def test_a_script_that_fails_or_is_missing_is_an_error(tmp_path: Path) -> None:
    ended = tune(tmp_path, "train.py", "breaks")
    assert ended.returncode == 1
    assert "the unchanged script failed: ValueError: there is no data" in ended.stderr
    ended = tune(tmp_path, "other.py")
    assert (ended.returncode, "Script 'other.py' does not exist" in ended.stderr) == (2, True)
