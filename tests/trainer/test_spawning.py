"""`strategy="ddp_spawn"` and its like: each verb in processes of its own, whose outcome comes back."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain import CheckpointError, ConfigurationError, ModelCheckpoint, Trainer
from drivetrain.launch.notebook import ScriptMain, ScriptReached, stop_at_start_of_processes, what_cannot_be_sent
from drivetrain.trainer import setup
from tests.launch.launching import end, run, started, wait_for_lines, write_script
from tests.trainer.tasks import Weight, ones

# A script without a guard: its top level runs again in each process, as far as the first verb.
SCRIPT = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Callback, ModelCheckpoint, Task, Trainer, set_seed


class Net(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.drop = torch.nn.Dropout(0.1)

    def training_step(self, batch, batch_idx):
        self.at_batch()
        loss = self.drop(self.layer(batch[0])).square().mean()
        self.log("loss", loss)
        self.log("rank", float(self.global_rank), on_step=False, on_epoch=True)
        return loss

    def at_batch(self):
        {at_batch}

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch[0]).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("tested", self.layer(batch[0]).square().mean())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counts(Callback):
    batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1

    def state_dict(self):
        return {{"batches": self.batches}}

    def load_state_dict(self, state):
        self.batches = state["batches"]


set_seed(3)
task = Net()
data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True)
plain = DataLoader(TensorDataset(torch.arange(32.0).reshape(8, 4)), batch_size=2)
saved, counts = ModelCheckpoint(monitor="val"), Counts()
trainer = Trainer(
    strategy=sys.argv[1], devices=2, accelerator="cpu", max_epochs={epochs}, callbacks=[saved, counts], logger="csv",
    enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
)
"""

VERBS = """
trainer.fit(task, data, plain)
facts = {
    "weights": [p.flatten().tolist() for p in task.parameters()],
    "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    "logged": trainer.logged_metrics,
    "at": [trainer.global_step, trainer.current_epoch, str(trainer.stop_reason), trainer.num_training_batches],
    "best": [os.path.basename(saved.best_model_path), float(saved.best_model_score)],
    "counted": counts.batches,
    "processes": [trainer.world_size, trainer.num_devices],
    "folder": os.path.basename(trainer.log_dir),
}
[facts["tested"]] = trainer.test(task, plain, ckpt_path="best")
[facts["of best"]] = trainer.test(dataloaders=plain)
[facts["validated"]] = trainer.validate(task, plain, verbose=False)
facts["predicted"] = torch.cat(trainer.predict(task, plain)).flatten().tolist()
trainer.max_epochs = 3
trainer.fit(task, data, plain)
facts["again"] = [trainer.global_step, trainer.current_epoch, counts.batches, os.path.basename(trainer.log_dir)]
facts["weights again"] = [p.flatten().tolist() for p in task.parameters()]
if trainer.is_global_zero:
    print(json.dumps(facts))
"""


def written(directory: Path, ending: str, at_batch: str = "pass", epochs: int = 2) -> Path:
    return write_script(directory, SCRIPT.format(at_batch=at_batch, epochs=epochs) + ending)


def facts_of(directory: Path, strategy: str) -> dict[str, Any]:
    directory.mkdir()
    written(directory, VERBS)
    ended = run("script.py", strategy, cwd=directory, timeout=200)
    assert ended.code == 0, ended.err
    assert "TCPStore" not in ended.err  # torch's stack trace of a process whose peer has left before it
    found: dict[str, Any] = json.loads(next(line for line in ended.out.splitlines() if line.startswith("{")))
    rows = (directory / "drivetrain_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    return found | {"rows": len(rows), "runs": len(list((directory / "drivetrain_logs").glob("version_*")))}


def close(found: Any, expected: Any) -> bool:
    """Whether two facts are equal, numbers to 5e-6."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(abs(found - expected) <= 5e-6 if isinstance(expected, float) else found == expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_every_verb_leaves_here_what_it_leaves_in_processes_that_run_the_whole_script(
    strategy: str, tmp_path: Path
) -> None:
    expected, found = facts_of(tmp_path / "ddp", "ddp"), facts_of(tmp_path / "spawned", strategy)
    assert {name: (found[name], each) for name, each in expected.items() if not close(found[name], each)} == {}
    assert (found["metrics"]["rank"], found["processes"], found["at"][:3]) == (0.5, [2, 2], [8, 2, "max_epochs"])
    assert len(found["predicted"]) == 8


CAUGHT = """
from drivetrain.runtime.errors import LaunchError
try:
    trainer.fit(task, data)
except LaunchError as error:
    print(error, flush=True)
    print("stopped by", trainer.stop_reason)
"""


@pytest.mark.parametrize(
    ("at_batch", "words"),
    [
        (
            "if self.global_rank == 1: raise ValueError('the cause')",
            ["rank 1", "in training_step", "self.at_batch()", "ValueError: the cause"],
        ),
        ("if self.global_rank == 1: os.kill(os.getpid(), 9)", ["rank 1", "killed by signal 9 (SIGKILL)"]),
    ],
)
def test_the_failure_of_a_process_is_raised_here(at_batch: str, words: list[str], tmp_path: Path) -> None:
    written(tmp_path, CAUGHT, at_batch)
    ended = run("script.py", "ddp_spawn", cwd=tmp_path, timeout=100)
    assert ended.code == 0, ended.err
    assert [word for word in (*words, "stopped by failed") if word not in ended.out] == []


AT_A_BATCH = 'print(f"pid {os.getpid()}\\n", end="", flush=True); time.sleep(0.05)'


def test_ctrl_c_saves_and_ends_all_processes(tmp_path: Path) -> None:
    ending = """
try:
    trainer.fit(task, data, plain)
except KeyboardInterrupt:
    print("left by Ctrl-C", trainer.stop_reason, os.path.exists(saved.newest_model_path), trainer.global_step > 0)
"""
    written(tmp_path, ending, AT_A_BATCH, epochs=1000)
    begin = time.monotonic()
    with started("script.py", "ddp_spawn", cwd=tmp_path) as process:
        lines = wait_for_lines(process, "pid ", 8)
        process.send_signal(signal.SIGINT)  # to this process alone: it reaches the others once
        ended = end(process, begin, timeout=60)
    assert "left by Ctrl-C interrupted True True" in ended.out, ended.err
    pids = {int(line.split()[1]) for line in lines if line.startswith("pid ")}
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.skipif(not hasattr(os, "setpgrp"), reason="needs process groups")
def test_processes_do_not_outlive_the_one_that_started_them(tmp_path: Path) -> None:
    written(tmp_path, "trainer.fit(task, data, plain)", AT_A_BATCH, epochs=1000)
    with started("script.py", "ddp_fork", cwd=tmp_path) as process:
        lines = wait_for_lines(process, "pid ", 8)
        pids = {int(line.split()[1]) for line in lines if line.startswith("pid ")}
        process.kill()
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


# in this process


def spawning(**options: Any) -> Trainer:
    options = {"devices": 2, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, **options}
    return Trainer(strategy="ddp_spawn", accelerator="cpu", max_epochs=1, **options)


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DRIVETRAIN_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_is_this_one() -> None:
    task = Weight(lr=1.0)
    trainer = spawning(devices=1)
    trainer.fit(task, ones(2))
    assert (trainer.spawning, trainer.world_size, trainer.strategy.name, len(task.gradients)) == (None, 1, "ddp", 2)


def test_what_cannot_be_pickled_is_named_with_what_to_do() -> None:
    task = Weight()
    task.guard = {"lock": threading.Lock()}  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"(?s)task.guard\['lock'\] \(lock\) cannot be pickled.*'ddp_fork'"):
        spawning().fit(task, ones(2))
    loader = ones(2)
    loader.collate_fn = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"fit\(train_dataloaders=...\)\.collate_fn"):
        spawning().fit(Weight(), loader)
    callback = ModelCheckpoint()
    callback.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"the callback ModelCheckpoint.lock"):
        spawning(callbacks=callback, enable_checkpointing=True).fit(Weight(), ones(2))


def test_all_that_can_be_pickled_is_named_by_nothing() -> None:
    assert what_cannot_be_sent({"task": Weight(), "rows": ones(2), "one": 1}, has_script=False) == ""


def test_a_launchers_processes_start_no_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(setup.logger, "_seen", set())
    for name, value in {"DRIVETRAIN_LAUNCHED": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        trainer = spawning(devices="auto")
    assert (trainer.spawning, trainer.strategy.name) == (None, "ddp")
    assert "instead of 'ddp_spawn', because a launcher" in caplog.text
    with pytest.raises(ConfigurationError, match=r"devices=2, but the launcher"):
        spawning(devices=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_nodes": 2}, "num_nodes=2 needs a launcher on every machine"),
        ({"devices": 0}, "devices=0 is not valid. Use the number of processes"),
    ],
)
def test_what_no_process_could_run_is_refused_when_the_trainer_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        spawning(**options)


def test_a_checkpoint_is_left_to_the_processes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Add a ModelCheckpoint, which saves during"):
        spawning().save_checkpoint(tmp_path / "here")


def test_a_script_is_imported_as_far_as_it_starts_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    path = write_script(
        tmp_path,
        """
        from drivetrain.launch.notebook import stop_at_start_of_processes
        name, before = __name__, 1
        stop_at_start_of_processes()
        after = 1
        """,
    )
    ScriptMain(str(path)).load()
    main = sys.modules["__main__"]
    assert (main.name, main.before, hasattr(main, "after")) == ("__mp_main__", 1, False)
    stop_at_start_of_processes()  # does nothing in any other process
    assert not issubclass(ScriptReached, Exception)
