"""When a run is validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import Callback, Task, Trainer
from tests.pool import run_in_processes
from tests.trainer.resume_runs import Broken
from tests.trainer.tasks import Count, Weight, fitted, ones, quiet, stream
from tests.trainer.test_limits import Clock, clock  # noqa: F401  (a fixture)

# options, the global steps at which validation begins; of 3 epochs of 6 batches
INTERVALS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [6, 12, 18]),
    ({"val_check_interval": 1.0}, [6, 12, 18]),
    ({"val_check_interval": 6}, [6, 12, 18]),
    ({"val_check_interval": 2}, [2, 4, 6, 8, 10, 12, 14, 16, 18]),
    ({"val_check_interval": 4}, [4, 10, 16]),
    ({"val_check_interval": 0.5}, [3, 6, 9, 12, 15, 18]),
    ({"val_check_interval": 0.34}, [2, 4, 6, 8, 10, 12, 14, 16, 18]),
    ({"check_val_every_n_epoch": 2}, [12]),
    ({"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, [9, 12]),
    ({"check_val_every_n_epoch": None, "val_check_interval": 4}, [4, 8, 12, 16]),
    ({"check_val_every_n_epoch": None, "val_check_interval": 9}, [9, 18]),
    ({"check_val_every_n_epoch": None, "val_check_interval": 20}, []),
    ({"val_check_interval": 2, "limit_train_batches": 5}, [2, 4, 7, 9, 12, 14]),
    ({"val_check_interval": 4, "accumulate_grad_batches": 2}, [2, 5, 8]),
    ({"val_check_interval": 3, "accumulate_grad_batches": 2}, [2, 3, 5, 6, 8, 9]),
    ({"max_steps": 7}, [6]),
    ({"max_steps": 7, "val_check_interval": 1}, [1, 2, 3, 4, 5, 6, 7]),
]


@pytest.mark.parametrize(("options", "steps"), INTERVALS, ids=[str(case[0]) for case in INTERVALS])
def test_validation_comes_when_it_is_asked_for(options: dict[str, Any], steps: list[int]) -> None:
    count = Count("on_validation_start")
    fitted(Weight(), ones(6), ones(1), callbacks=count, **{"max_epochs": 3, **options})
    assert count.steps["on_validation_start"] == steps


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, [6, 12]), ({"val_check_interval": 2}, [2, 4, 6, 8, 10, 12]), ({"val_check_interval": 4}, [4, 10])],
    ids=str,
)
def test_a_stream_is_validated_likewise(options: dict[str, Any], steps: list[int]) -> None:
    count = Count("on_validation_start")
    fitted(Weight(), stream([1.0] * 6), ones(1), callbacks=count, max_epochs=2, **options)
    assert count.steps["on_validation_start"] == steps


def test_validation_may_follow_the_clock(clock: None) -> None:  # noqa: F811
    count = Count("on_validation_start")
    fitted(Clock(), ones(6), ones(1), callbacks=count, max_epochs=3, val_check_interval={"seconds": 5})
    assert count.steps["on_validation_start"] == [5, 10, 15]


class SaveAndBreak(Callback):
    """Saves at a hook of the first validation, and ends the run there."""

    def __init__(self, path: Path, late: bool) -> None:
        self.path, self.late = path, late

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        self._break(trainer, not self.late)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self._break(trainer, self.late)

    def _break(self, trainer: Trainer, here: bool) -> None:
        if here:
            trainer.save_checkpoint(self.path)
            raise Broken


@pytest.mark.parametrize(("seconds", "late", "steps"), [(5, False, [5, 10]), (5, True, [10]), (6, False, [6, 12])])
def test_a_validation_by_the_clock_runs_again_after_a_save_within_it(
    clock: None,  # noqa: F811
    tmp_path: Path,
    seconds: int,
    late: bool,
    steps: list[int],
) -> None:
    every = {"max_epochs": 2, "val_check_interval": {"seconds": seconds}}
    path, count = tmp_path / "within", Count("on_validation_start")
    with pytest.raises(Broken):
        fitted(Clock(), ones(6), ones(1), callbacks=SaveAndBreak(path, late), **every)
    quiet(callbacks=count, **every).fit(Clock(), ones(6), ones(1), resume=path)
    assert count.steps["on_validation_start"] == steps


def test_the_end_of_training_is_told_from_validation() -> None:
    stages: list[tuple[str, bool, bool]] = []

    class Noting(Weight):
        def note(self, where: str) -> None:
            stages.append((where, self.trainer.training, self.trainer.validating))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("train")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.note("validate")

        def on_train_epoch_end(self) -> None:
            self.note("end")

    fitted(Noting(), ones(1), ones(1))
    assert stages == [("train", True, False), ("validate", False, True), ("end", True, False)]


def intervals_on_two() -> list[list[int]]:
    found = []
    for options in ({}, {"val_check_interval": 2}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}):
        count = Count("on_validation_start")
        fitted(Weight(), ones(7), ones(1), callbacks=count, max_epochs=2, **options)
        found.append(count.steps["on_validation_start"])
    return found


def test_intervals_count_each_processes_own_batches() -> None:
    for found in run_in_processes(intervals_on_two, 2):
        assert found == [[4, 8], [2, 4, 6, 8], [2, 4, 6, 8], [8]]


def test_gradients_are_freed_before_validation() -> None:
    seen: list[Any] = []

    class Noting(Weight):
        def on_validation_start(self) -> None:
            seen.append(self.w.grad)

    fitted(Noting(), ones(2), ones(1))
    assert seen == [None]
