"""A run with everything that is on by default needs nothing of Python that Windows does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import multiprocessing, os, signal, sys
import filelock, psutil, torch, torch.distributed.checkpoint  # which have their own ways on Windows

multiprocessing.get_all_start_methods = lambda: ["spawn"]
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in (
    "O_CLOEXEC O_DIRECT O_DIRECTORY fork getuid getpgid killpg pidfd_open posix_fadvise preadv pwritev "
    "register_at_fork sched_getaffinity set_blocking setsid splice statvfs uname"
).split():
    delattr(os, name)
for name in "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGQUIT SIGRTMAX SIGRTMIN SIGSTOP SIGUSR1 SIGUSR2".split():
    delattr(signal, name)
"""

OPENS_NO_DIRECTORY = """
open_file = os.open


def open_no_directory(path, *args, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_file(path, *args, **kwargs)


os.open = open_no_directory
"""

RUN = """
from drivetrain import Task, Trainer
from drivetrain.cli.main import main


class Regression(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


batches = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
first = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=sys.argv[1])
first.fit(Regression(), batches, batches)
path = first.checkpoint_callback.last_model_path or first.checkpoint_callback.best_model_path
trainer = Trainer(accelerator="cpu", max_epochs=2, default_root_dir=sys.argv[1])
trainer.fit(Regression(), batches, batches, resume=path)
assert (first.global_step, trainer.global_step) == (4, 8), (first.global_step, trainer.global_step)
"""


SEVERAL_PROCESSES = {
    "launch": "sys.argv[1:] = 'launch --cpu --num_processes 2 x.py'.split(); main()",
    "test": "sys.argv[1:] = 'test --cpu --num_processes 2'.split(); main()",
    "devices": "Trainer(accelerator='cpu', devices=2, logger=False).fit(Regression(), batches)",
    "notebook": "import drivetrain; drivetrain.notebook_launcher(print, num_processes=2)",
}

SPAWN = """
if __name__ == "__main__":
    batches = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", max_epochs=1, default_root_dir=sys.argv[1])
    trainer.fit(Regression(), batches)
    assert trainer.global_step == 2, trainer.global_step
"""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "x.py").write_text(script)
    command = [sys.executable, "x.py", "runs"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment, check=False
    )


@pytest.mark.parametrize("way", SEVERAL_PROCESSES)
def test_several_processes_are_refused_in_one_sentence(way: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"{WITHOUT}\n{RUN.partition('first = ')[0]}\n{SEVERAL_PROCESSES[way]}")
    assert done.returncode != 0
    assert "Trainer(strategy='ddp_spawn')" in done.stderr
    assert "AttributeError" not in done.stderr


def test_spawned_processes_train(tmp_path: Path) -> None:
    done = run(tmp_path, WITHOUT + RUN.partition("batches = ")[0] + SPAWN)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["--help", "env", "runs", "launch --help", "config --config_file c.yaml default"])
def test_commands_that_start_no_processes_work(command: str, tmp_path: Path) -> None:
    script = f"{WITHOUT}\nfrom drivetrain.cli.main import main\nsys.argv[1:] = {command.split()}\nmain()"
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert "AttributeError" not in done.stderr


def test_a_run_is_written_listed_saved_and_resumed(tmp_path: Path) -> None:
    done = run(tmp_path, WITHOUT + OPENS_NO_DIRECTORY + RUN)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "runs" / "drivetrain_logs" / "index").read_text().splitlines()
    assert len(index) == 3  # the title and both runs
    assert list(tmp_path.rglob("MANIFEST.json"))
    assert list(tmp_path.rglob("report.html"))
