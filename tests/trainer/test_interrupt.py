"""Ctrl-C ends a run cleanly, after the step under way, at the same step on every process."""

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

from drivetrain import Callback, Task, Trainer
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


def test_once_it_ends_the_run_after_the_step_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    count = Count(*ENDING)
    trainer = fitted(Weight(), ones(10), ones(1), callbacks=[SendAt(3), count], max_epochs=5)
    assert (trainer.global_step, trainer.current_epoch, trainer.interrupted) == (4, 0, True)
    assert {name: count[name] for name in ENDING} == dict.fromkeys(ENDING, 1) | {"on_exception": 0}
    assert "Interrupted" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_twice_it_ends_the_run_at_once_and_still_tears_down() -> None:
    count = Count(*ENDING)
    trainer = fitted(Weight(), ones(10), callbacks=[SendAt(3, times=2), count])
    assert (trainer.global_step, trainer.interrupted) == (3, True)
    assert {name: count[name] for name in ENDING} == dict.fromkeys(ENDING, 0) | {"teardown": 1, "on_exception": 1}


def test_an_interrupt_that_a_step_raises_ends_the_run_too() -> None:
    class Interrupting(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

    assert fitted(Interrupting(), ones(1)).interrupted


def test_it_wins_over_the_least_asked_for() -> None:
    assert fitted(Weight(), ones(10), callbacks=SendAt(0), min_epochs=3, max_epochs=5).global_step == 1


def test_it_holds_where_no_step_is_taken_at_all() -> None:
    class Skipping(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.batches.append((0, batch_idx, 0.0))
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGINT)

    task = Skipping()
    fitted(task, ones(10))
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
    trainer = quiet(SendAt(3), max_epochs=1)
    trainer.fit(Weight(), ones(10))
    task = Weight()
    trainer.fit(task, ones(10))
    assert (trainer.interrupted, len(task.batches), trainer.current_epoch) == (False, 10, 1)


def interrupted_on_one_rank() -> tuple[int, bool]:
    trainer = fitted(Weight(), ones(200_000), callbacks=SendAt(3, rank=1), max_epochs=1)
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
    trainer.fit(task, torch.utils.data.DataLoader(torch.ones(100_000), batch_size=2))
    record = {"world": trainer.world_size, "steps": trainer.global_step, "interrupted": trainer.interrupted}
    Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(record))
"""


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]


def test_devices_2_in_a_plain_script_starts_two_processes(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    command = [sys.executable, str(script), "3"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert records(tmp_path) == [{"world": 2, "steps": 3, "interrupted": False}] * 2


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
