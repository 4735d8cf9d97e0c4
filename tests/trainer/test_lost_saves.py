"""A save in the background that fails ends the run on all processes alike, and none of them waits for the others."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointError, ModelCheckpoint, Trainer
from drivetrain.checkpoint import Checkpoint
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from tests.callbacks.guarded import Regression, train
from tests.callbacks.test_checkpoint_saving import At, FullDisk
from tests.pool import run_in_processes


def lose_a_save(root: str, rank: int, every: int = 0, is_preempted: bool = False, **options: Any) -> tuple[Any, int]:
    """Save in the background by hand after three steps, on a disk that is full for one process.

    Args:
        root: the directory to save in.
        rank: whose disk is full.
        every: after how many steps checkpoints are kept as well, whose errors only warn; 0 for never.
        is_preempted: whether a signal comes at the same time.
        options: for the Trainer.

    Returns:
        How the run ended, and after how many steps.
    """

    def save(trainer: Trainer) -> None:
        pending = trainer.save_checkpoint(f"{root}/mine", block=False)
        pending._finished.wait(60)
        assert pending.failed()
        if is_preempted:
            os.kill(os.getpid(), signal.SIGTERM)

    task = Regression({})
    callbacks: list[Any] = [At(3, save)]
    if every:
        callbacks.append(ModelCheckpoint(root, "{step}", every_n_train_steps=every, on_save_error="warn"))
    ended: Any = "went on"
    with FullDisk("mine") if int(os.environ["RANK"]) == rank else nullcontext():
        try:
            train(task, root, callbacks, epochs=3000, enable_checkpointing=bool(every), **options)
        except CheckpointError as error:
            ended = str(error)
        except SystemExit as exit:
            ended = exit.code
    return ended, len(task.trained)


@pytest.mark.parametrize("options", [{}, {"min_steps": 10**6}, {"every": 4}], ids=["alone", "least", "kept"])
@pytest.mark.parametrize("rank", [0, 1])
def test_it_is_raised_on_all_processes_at_the_same_step(rank: int, options: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_in_processes(lose_a_save, args=(str(tmp_path), rank), kwargs=options, timeout=60)
    assert first == second
    ended, steps = first
    assert f"mine could not be written: rank {rank}: " in ended
    assert "No space left on device" in ended
    assert 3 <= steps < 18000
    assert "mine" not in os.listdir(tmp_path)


def test_one_process_raises_it_at_once(tmp_path: Path) -> None:
    ((ended, steps),) = run_in_processes(lose_a_save, 1, args=(str(tmp_path), 0), timeout=60)
    assert "No space left on device" in ended
    assert steps == 3


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("every", [0, 100])
def test_a_run_that_is_preempted_meanwhile_saves_what_it_goes_on_from(
    every: int, processes: int, tmp_path: Path
) -> None:
    arguments = (str(tmp_path), 0, every, True)
    results = run_in_processes(lose_a_save, processes, args=arguments, timeout=60)
    assert len(set(results)) == 1
    ended, steps = results[0]
    assert ended == RESUME_EXIT_CODE
    folder = tmp_path if every else tmp_path / "checkpoints"
    assert Checkpoint(folder / f"preempted-step={steps}.ckpt").manifest.step == steps
