"""Runs, validations and checkpoints that are measured in steps, epochs, samples, tokens, time or parts of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from drivetrain import ConfigurationError, ModelCheckpoint, Task
from tests.pool import run_in_processes
from tests.trainer.tasks import Count, Weight, fitted, ones, quiet, rows
from tests.trainer.test_limits import Clock, clock  # noqa: F401  (a fixture)


class Counted(Weight):
    """A batch has as many tokens as its values add up to."""

    def num_tokens(self, batch: list[Tensor]) -> int:
        return int(batch[0].sum())


class Weighed(Weight):
    """The losses of a batch weigh what its values add up to."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": self.w * batch[0].sum(), "weight": batch[0].sum()}


def data() -> Any:
    """22 samples in batches of 4, the last one of 2; all values are 3."""
    return rows([3.0] * 22, batch_size=4)


# how long, and the steps after which the run ends; an epoch has 6 batches, 22 samples and 66 tokens
ENDS: list[tuple[type[Weight], dict[str, Any], int]] = [
    (Weight, {"max_duration": "8 steps"}, 8),
    (Weight, {"max_duration": "2ep"}, 12),
    (Weight, {"max_duration": "20 samples"}, 5),
    (Weight, {"max_duration": "22 samples"}, 6),
    (Weight, {"max_duration": "23 samples"}, 7),
    (Weight, {"max_duration": "46 samples"}, 13),
    (Weight, {"max_duration": "9 samples", "accumulate_grad_batches": 2}, 2),
    (Weight, {"max_duration": "9 steps", "max_epochs": 1}, 6),
    (Weight, {"max_duration": "1M samples", "max_steps": 4}, 4),
    (Weight, {"max_duration": "1M samples", "fast_dev_run": 2}, 2),
    (Counted, {"max_duration": "66 tokens"}, 6),
    (Counted, {"max_duration": "67 tokens"}, 7),
    (Weighed, {"max_duration": "66 tokens"}, 6),
    (Weighed, {"max_duration": "67 tokens"}, 7),
    (Weighed, {"max_duration": "25 tokens", "accumulate_grad_batches": 2}, 2),
]


@pytest.mark.parametrize(("task", "options", "steps"), ENDS, ids=str)
def test_a_run_ends_at_the_first_step_that_completes_it(
    task: type[Weight], options: dict[str, Any], steps: int
) -> None:
    trainer = fitted(task(), data(), **{"max_epochs": None, **options})
    assert trainer.global_step == steps


def test_the_end_says_what_was_reached() -> None:
    trainer = fitted(Weight(), data(), max_epochs=None, max_duration="9 samples")
    assert trainer.stop_reason == "max_duration"
    assert trainer.control.details == "max_duration=9 samples is reached"
    assert trainer.progress.samples == 12


def test_time_ends_a_run(clock: None) -> None:  # noqa: F811
    assert fitted(Clock(), ones(6), max_epochs=None, max_duration="8 s").global_step == 8


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_resumed_run_ends_where_the_unbroken_one_does(tmp_path: Path, unit: str) -> None:
    size = 3 if unit == "tokens" else 1
    first = fitted(Counted(), data(), max_epochs=None, max_duration=f"{26 * size} {unit}")
    first.save_checkpoint(tmp_path / "first")
    again = quiet(max_epochs=None, max_duration=f"{51 * size} {unit}")
    again.fit(Counted(), data(), resume=tmp_path / "first")
    whole = fitted(Counted(), data(), max_epochs=None, max_duration=f"{51 * size} {unit}")
    assert first.global_step == 7
    assert again.global_step == whole.global_step == 14
    assert again.progress.state_dict() == whole.progress.state_dict()


def test_a_run_that_has_not_counted_from_its_beginning_is_refused(tmp_path: Path) -> None:
    fitted(Weight(), data(), max_steps=3).save_checkpoint(tmp_path / "first")
    with pytest.raises(ConfigurationError, match="did not count samples in its first 3 steps"):
        quiet(max_epochs=None, max_duration="50 samples").fit(Weight(), data(), resume=tmp_path / "first")


def steps_and_counts(task: type[Weight], limit: str, every: str | None = None) -> list[Any]:
    count = Count("on_validation_start")
    task_data = rows([float(value) for value in range(1, 10)], batch_size=2)
    options: dict[str, Any] = {"max_epochs": None, "max_duration": limit, "val_check_interval": every}
    trainer = fitted(task(), task_data, ones(2), callbacks=count, **options)
    return [trainer.global_step, trainer.progress.samples, trainer.progress.tokens, count.steps["on_validation_start"]]


def test_two_processes_count_all_of_their_samples_and_tokens() -> None:
    # The global batches are (1 2, 3 4), (5 6, 7 8) and (9, padding): 4, 4 and 1 samples; 10, 26 and 9 tokens.
    assert run_in_processes(steps_and_counts, args=(Weight, "9 samples", "8 samples")) == [[3, 9, 0, [2]]] * 2
    assert run_in_processes(steps_and_counts, args=(Counted, "46 tokens")) == [[4, 0, 55, [3]]] * 2
    assert run_in_processes(steps_and_counts, args=(Weighed, "45 tokens")) == [[3, 0, 45, [3]]] * 2


VALIDATIONS: list[tuple[dict[str, Any], list[int]]] = [
    ({"val_check_interval": "4 steps"}, [4, 8, 12, 16]),
    ({"val_check_interval": "4 steps", "accumulate_grad_batches": 2}, [4, 8]),
    ({"val_check_interval": "2 epochs"}, [12]),
    ({"val_check_interval": "10 samples"}, [3, 5, 8, 10, 13, 15, 18]),
    ({"val_check_interval": "50%"}, [9, 18]),
    ({"val_check_interval": "50%", "max_epochs": None, "max_duration": "40 samples"}, [5, 10]),
    ({"val_check_interval": "100%"}, [18]),
]


@pytest.mark.parametrize(("options", "steps"), VALIDATIONS, ids=str)
def test_validation_comes_as_often_as_it_is_asked_for(options: dict[str, Any], steps: list[int]) -> None:
    count = Count("on_validation_start")
    fitted(Weight(), ones(24, 4), ones(1), callbacks=count, **{"max_epochs": 3, **options})
    assert count.steps["on_validation_start"] == steps


def test_a_validation_that_is_due_when_a_run_is_saved_comes_after_the_resume(tmp_path: Path) -> None:
    class Save(Weight):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / str(self.global_step))

    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": "10 samples"}
    fitted(Save(), ones(24, 4), ones(1), **options)
    for saved, steps in ((2, [3, 5, 8, 10]), (3, [3, 5, 8, 10]), (4, [5, 8, 10])):
        count = Count("on_validation_start")
        quiet(callbacks=count, **options).fit(Weight(), ones(24, 4), ones(1), resume=tmp_path / str(saved))
        assert count.steps["on_validation_start"] == steps


SAVES: list[tuple[dict[str, Any], list[int]]] = [
    ({"every": "4 steps"}, [4, 8, 12, 16]),
    ({"every": "2 epochs"}, [12]),
    ({"every": "10 samples"}, [3, 5, 8, 10, 13, 15, 18]),
    ({"every": "50%"}, [9, 18]),
]


@pytest.mark.parametrize(("options", "steps"), SAVES, ids=str)
def test_checkpoints_come_as_often_as_they_are_asked_for(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **options)
    fitted(Weight(), ones(24, 4), callbacks=saving, max_epochs=3, enable_checkpointing=True)
    assert sorted(int(path.stem.removeprefix("step=")) for path in tmp_path.iterdir()) == steps


def test_an_option_is_read_when_it_is_written() -> None:
    trainer = quiet()
    trainer.val_check_interval = "10 min"  # type: ignore[assignment]
    trainer.max_duration = "70 steps"  # type: ignore[assignment]
    assert trainer.val_check_interval.total_seconds() == 600  # type: ignore[union-attr]
    assert trainer.max_steps == 70


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_duration": "5 stepps"}, "'stepps' is not a unit.*Did you mean 'steps'"),
        ({"max_duration": "10%"}, "is a fraction of the run, so it cannot limit the run"),
        ({"max_duration": "5 steps", "max_steps": 4}, "max_duration='5 steps' and max_steps=4 limit the same"),
        ({"max_duration": "1 min", "max_time": "2 min"}, "limit the same"),
        ({"max_time": "5 steps"}, "max_time='5 steps' is not a time.*max_duration takes the other units"),
        ({"val_check_interval": "5 steps", "check_val_every_n_epoch": 3}, "counts across epochs"),
        ({"val_check_interval": "0 steps"}, "must be greater than 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        quiet(**{"max_epochs": None, **options})


def test_a_checkpoint_has_one_rhythm() -> None:
    with pytest.raises(ConfigurationError, match=r"is not allowed: .*every='2 epochs'"):
        ModelCheckpoint(every="2 epochs", every_n_train_steps=3)


def test_tokens_that_nobody_counts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Define num_tokens\(batch\) on the task"):
        fitted(Weight(), data(), max_epochs=None, max_duration="9 tokens")


def test_a_part_of_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the length of the run is unknown"):
        fitted(Weight(), data(), ones(1), max_epochs=-1, val_check_interval="10%")


def test_a_part_of_the_time_is_a_time(clock: None) -> None:  # noqa: F811
    count = Count("on_validation_start")
    options: dict[str, Any] = {"max_epochs": None, "max_duration": "12 s", "val_check_interval": "50%"}
    fitted(Clock(), ones(6), ones(1), callbacks=count, **options)
    assert count.steps["on_validation_start"] == [6, 12]


def test_nothing_is_counted_that_nobody_asks_for() -> None:
    task: Task = Counted()
    assert fitted(task, data()).progress.samples == 0
