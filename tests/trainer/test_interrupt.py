"""Ctrl-C ends a run cleanly, after the step under way, at the same step on every process, and then the script too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Callback, EarlyStopping, Task, Trainer
from tests.launch.launching import clean_environment, started, write_script
from tests.pool import run_in_processes
from tests.trainer.tasks import Count, Weight, fitted, ones, quiet

ENDING = ("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "on_exception")


class SendAt(Callback):
    """Sends this process SIGINT in a step, as the terminal does at Ctrl-C."""

    def __init__(self, step: int, times: int = 1, rank: int = 0) -> None:
        self.step, self.times, self.rank = step, times, rank

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


def interrupted_fit(trainer: Trainer, task: Task, count: int = 10) -> Trainer:
    """Fit, and see that Ctrl-C ends more than `fit`."""
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(task, ones(count), ones(1))
    return trainer


def test_once_it_ends_the_run_after_the_step_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    count = Count(*ENDING)
    trainer = interrupted_fit(quiet([SendAt(3), count], max_epochs=5), Weight())
    assert (trainer.global_step, trainer.current_epoch, trainer.interrupted) == (4, 0, True)
    assert {name: count[name] for name in ENDING} == dict.fromkeys(ENDING, 1) | {"on_exception": 0}
    assert "Interrupted: the run ended after 4 steps (0 epochs): Ctrl-C." in capsys.readouterr().out
    assert trainer.stop_reason == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fit_returns_where_that_was_asked_for() -> None:
    trainer = fitted(Weight(), ones(10), callbacks=SendAt(3), on_interrupt="return")
    assert (trainer.global_step, trainer.interrupted) == (4, True)


def test_it_saves_and_the_run_can_be_resumed_from_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 2}
    interrupted_fit(quiet(SendAt(3), **options), Weight())
    saved = tmp_path / "checkpoints" / "interrupted-step=4.ckpt"
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert f"To resume: fit(..., resume={str(saved)!r}), or resume='auto'." in capsys.readouterr().out
    task = Weight()
    trainer = quiet(**options)
    trainer.fit(task, ones(10), resume="auto")
    assert [batch[:2] for batch in task.batches] == [(0, index) for index in range(4, 10)] + [(1, i) for i in range(10)]
    assert trainer.stop_reason == "max_epochs"


def test_an_epoch_without_its_validation_is_no_check_of_early_stopping(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss")
    trainer = quiet([SendAt(3), stopping], enable_checkpointing=True, default_root_dir=tmp_path)
    assert interrupted_fit(trainer, Weight()).stop_reason == "interrupted"
    assert stopping.wait_count == 0


def test_twice_it_ends_the_run_at_once_and_still_tears_down() -> None:
    count = Count(*ENDING)
    trainer = interrupted_fit(quiet([SendAt(3, times=2), count]), Weight())
    assert (trainer.global_step, trainer.interrupted) == (3, True)
    assert {name: count[name] for name in ENDING} == dict.fromkeys(ENDING, 0) | {"teardown": 1, "on_exception": 1}


def test_an_interrupt_that_a_step_raises_ends_the_run_too() -> None:
    class Interrupting(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

    assert interrupted_fit(quiet(), Interrupting()).interrupted
    assert fitted(Interrupting(), ones(1), on_interrupt="return").interrupted


def test_it_wins_over_the_least_asked_for() -> None:
    assert interrupted_fit(quiet(SendAt(0), min_epochs=3, max_epochs=5), Weight()).global_step == 1


def test_it_holds_where_no_step_is_taken_at_all() -> None:
    class Skipping(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.batches.append((0, batch_idx, 0.0))
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGINT)

    task = Skipping()
    interrupted_fit(quiet(), task)
    assert len(task.batches) == 3


def test_a_handler_of_ones_own_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        trainer = fitted(Weight(), ones(10), callbacks=SendAt(3))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (trainer.global_step, seen) == (10, [signal.SIGINT])


def test_a_fit_after_an_interrupted_one_trains_on() -> None:
    trainer = interrupted_fit(quiet(SendAt(3), max_epochs=1), Weight())
    task = Weight()
    trainer.callbacks.clear()
    trainer.fit(task, ones(10))
    assert (trainer.interrupted, len(task.batches), trainer.current_epoch) == (False, 10, 1)


def interrupted_on_one_rank() -> tuple[int, bool]:
    trainer = fitted(Weight(), ones(200_000), callbacks=SendAt(3, rank=1), on_interrupt="return")
    return trainer.global_step, trainer.interrupted


def test_on_one_rank_alone_it_ends_all_at_the_same_step() -> None:
    first, second = run_in_processes(interrupted_on_one_rank, 2)
    assert first == second
    assert first[1]
    assert 4 <= first[0] < 100_000


# real scripts


SCRIPT = """
    import json
    import os
    import sys
    import time
    from pathlib import Path

    import torch

    from drivetrain import Callback, Task, Trainer


    class Slow(Task):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, batch_idx):
            time.sleep(0.01)
            return self.w * batch.mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)


    class Ready(Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            if batch_idx == 5:
                Path(f"ready{trainer.global_rank}").touch()


    steps = int(sys.argv[1])
    trainer = Trainer(
        accelerator="cpu", devices=2, max_steps=steps, callbacks=Ready(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    task = Slow()
    try:
        trainer.fit(task, torch.utils.data.DataLoader(torch.ones(100_000), batch_size=2))
    except KeyboardInterrupt:
        record = {"world": trainer.world_size, "steps": trainer.global_step, "interrupted": trainer.interrupted}
        Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(record))
        raise
    record = {"world": trainer.world_size, "steps": trainer.global_step, "interrupted": trainer.interrupted}
    Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(record))
"""


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]


@pytest.mark.crash
def test_devices_2_in_a_plain_script_starts_two_processes(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    command = [sys.executable, str(script), "3"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert records(tmp_path) == [{"world": 2, "steps": 3, "interrupted": False}] * 2


@pytest.mark.crash
def test_ctrl_c_in_a_terminal_ends_both_processes_of_a_script_at_the_same_step(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    with started(str(script), "100000", cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert time.monotonic() < deadline, "the two processes did not begin to train"
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
    first, second = records(tmp_path)
    assert first == second
    assert first["interrupted"]
    assert 5 < first["steps"] < 100_000
    assert process.returncode == 130


ALONE = """
    import sys
    import time
    from pathlib import Path

    import torch

    from drivetrain import Task, Trainer


    class Long(Task):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, batch_idx):
            Path("ready0").touch()
            if sys.argv[1] == "native":  # no bytecode runs meanwhile, so no handler does
                x = torch.ones(3000, 3000)
                while True:
                    torch.linalg.multi_dot([x] * 2000)
            return self.w * batch.mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)


    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    workers = int(sys.argv[2])
    trainer.fit(Long(), torch.utils.data.DataLoader(torch.ones(100_000), batch_size=2, num_workers=workers))
    Path("after").touch()
"""


@pytest.mark.crash
@pytest.mark.parametrize(("kind", "workers", "times"), [("steps", 0, 1), ("steps", 2, 1), ("native", 0, 2)])
def test_ctrl_c_ends_the_script_with_130(tmp_path: Path, kind: str, workers: int, times: int) -> None:
    script = write_script(tmp_path, ALONE)
    command = [sys.executable, str(script), kind, str(workers)]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready0").exists():
            assert time.monotonic() < deadline, "the script did not begin to train"
            time.sleep(0.05)
        for _ in range(times):
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    # Python itself ends by the signal after an uncaught KeyboardInterrupt, which a shell shows as 130.
    assert process.returncode in (130, -signal.SIGINT), error
    assert not (tmp_path / "after").exists()
    assert ("Interrupted twice" in error) == (times == 2)
