"""How much is trained, validated, tested and predicted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import drivetrain
from drivetrain import Callback, ConfigurationError, CSVLogger, ModelCheckpoint, Task, Trainer
from tests.pool import run_in_processes
from tests.trainer.tasks import Count, Weight, fitted, ones, quiet, rows, stream

# options, steps, epochs; of 6 batches an epoch
ENDS: list[tuple[dict[str, Any], int, int]] = [
    ({"max_epochs": 2}, 12, 2),
    ({"max_epochs": 0}, 0, 0),
    ({"max_epochs": None, "max_steps": 8}, 8, 1),
    ({"max_epochs": -1, "max_steps": 6}, 6, 1),
    ({"max_epochs": 2, "max_steps": 100}, 12, 2),
    ({"max_steps": 0}, 0, 0),
    ({"max_epochs": 2, "accumulate_grad_batches": 4}, 4, 2),
    ({"max_epochs": None, "max_steps": 3, "accumulate_grad_batches": 4}, 3, 1),
    ({"max_epochs": 2, "limit_train_batches": 4}, 8, 2),
    ({"max_epochs": 2, "limit_train_batches": 0.5}, 6, 2),
    ({"max_epochs": 2, "limit_train_batches": 1.0}, 12, 2),
    ({"max_epochs": 2, "limit_train_batches": 1}, 2, 2),
    ({"max_epochs": 2, "limit_train_batches": 100}, 12, 2),
    ({"max_epochs": 2, "limit_train_batches": 0}, 0, 0),
    ({"max_epochs": 2, "limit_train_batches": 0.0}, 0, 0),
    ({"max_epochs": 9, "fast_dev_run": True}, 1, 1),
    ({"max_epochs": 9, "fast_dev_run": 3}, 3, 1),
    ({"max_epochs": 2, "overfit_batches": 2}, 4, 2),
    ({"max_epochs": 2, "overfit_batches": 0.5}, 6, 2),
]


@pytest.mark.parametrize(("options", "steps", "epochs"), ENDS, ids=[str(case[0]) for case in ENDS])
def test_a_run_ends_where_it_should(options: dict[str, Any], steps: int, epochs: int) -> None:
    trainer = fitted(Weight(), ones(6), ones(6), **options)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)


def test_a_run_without_any_end_has_1000_epochs() -> None:
    assert quiet(max_epochs=None).max_epochs == 1000
    assert quiet(max_epochs=None, max_steps=10).max_epochs == -1
    assert quiet(max_epochs=None, max_time={"hours": 1}).max_epochs == -1


def test_a_second_fit_goes_on_counting() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Weight(), ones(3))
    trainer.max_epochs = 3
    task = Weight()
    trainer.fit(task, ones(3))
    assert (trainer.global_step, trainer.current_epoch) == (9, 3)
    assert [batch[:2] for batch in task.batches] == [(e, b) for e in (1, 2) for b in range(3)]


@pytest.mark.parametrize("loader", [ones, lambda count: stream([1.0] * count)], ids=["known length", "unknown length"])
def test_max_steps_at_the_end_of_an_epoch_ends_that_epoch(loader: Any) -> None:
    trainer = fitted(Weight(), loader(4), max_epochs=-1, max_steps=8)
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)


class StopAt(Callback):
    """Wishes to stop at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 2), ({"min_steps": 5}, 5), ({"min_epochs": 2}, 12), ({"min_steps": 8, "min_epochs": 1}, 8)],
    ids=str,
)
def test_a_wish_to_stop_waits_for_the_least_asked_for(options: dict[str, Any], steps: int) -> None:
    assert fitted(Weight(), ones(6), callbacks=StopAt(2), max_epochs=5, **options).global_step == steps


def test_a_wish_to_stop_that_has_to_wait_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="drivetrain"):
        fitted(Weight(), ones(2), callbacks=StopAt(1), max_epochs=5, min_epochs=4)
    lines = [record.getMessage() for record in caplog.records if "has not been met" in record.getMessage()]
    assert len(lines) == 1
    assert "StopAt.on_train_batch_end" in lines[0]
    assert "`min_epochs=4`" in lines[0]


class Clock(Weight):
    """Moves the clock of the loop on by a second with each batch."""

    seconds = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Clock.seconds += 1.0
        return super().training_step(batch, batch_idx)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock.seconds = 0.0
    monkeypatch.setattr("drivetrain.trainer.loops.run_control.time.monotonic", lambda: Clock.seconds)


@pytest.mark.parametrize("given", [{"seconds": 7}, "00:00:00:07"], ids=str)
def test_max_time_ends_a_run_after_the_step_under_way(clock: None, given: Any) -> None:
    assert fitted(Clock(), ones(100), max_time=given).global_step == 7


def test_max_time_wins_over_min_epochs(clock: None) -> None:
    assert fitted(Clock(), ones(100), max_time={"seconds": 3}, min_epochs=5, max_epochs=9).global_step == 3


def test_max_time_holds_where_no_step_is_taken_at_all(clock: None) -> None:
    class Skipping(Clock):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return None

    task = Skipping()
    trainer = fitted(task, ones(100), max_time={"seconds": 5})
    assert (trainer.global_step, len(task.batches)) == (0, 5)


# evaluation

EVALUATED: list[tuple[Any, list[int]]] = [
    (None, [6, 3]),
    (1.0, [6, 3]),
    (2, [2, 2]),
    (1, [1, 1]),
    (0.5, [3, 1]),
    (100, [6, 3]),
]


@pytest.mark.parametrize(("limit", "batches"), EVALUATED, ids=str)
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_limits_hold_for_each_loader_of_an_evaluation(limit: Any, batches: list[int], verb: str) -> None:
    class Evaluated(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.seen = [0, 0]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen[dataloader_idx] += 1

        test_step = predict_step = validation_step

    name = "val" if verb == "validate" else verb
    task = Evaluated()
    trainer = quiet(**{f"limit_{name}_batches": limit})
    getattr(trainer, verb)(task, [ones(6), ones(3)])
    assert task.seen == batches
    assert getattr(trainer, f"num_{name}_batches") == batches


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_limit_of_0_leaves_out_all_of_an_evaluation(verb: str) -> None:
    class Evaluated(Weight):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError("no batch was asked for")

        validation_step = predict_step = test_step

    name = "val" if verb == "validate" else verb
    count = Count(*(f"on_{stage}_start" for stage in ("validation", "test", "predict")))
    trainer = quiet(count, **{f"limit_{name}_batches": 0})
    assert getattr(trainer, verb)(Evaluated(), [ones(6), ones(3)]) == []
    assert getattr(trainer, f"num_{name}_batches") == []
    assert not any(count.steps.values())


def test_limit_val_batches_0_leaves_validation_out_of_fit() -> None:
    count = Count("on_validation_start", "on_sanity_check_start")
    fitted(Weight(), ones(2), ones(2), callbacks=count, limit_val_batches=0, num_sanity_val_steps=2)
    assert (count["on_validation_start"], count["on_sanity_check_start"]) == (0, 0)


def limited_on_two() -> tuple[int, list[float], int]:
    seen: list[Any] = []

    class Noting(Weight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    trainer = fitted(Noting(), ones(7), ones(3), limit_val_batches=0.5, limit_train_batches=0.5)
    return trainer.global_step, trainer.num_val_batches, len(seen)


def test_fractions_mean_the_same_on_every_process() -> None:
    # 4 steps of training, of which half; and 2 and 1 batches of validation, of which the first.
    assert run_in_processes(limited_on_two, 2) == [(2, [1], 1), (2, [1], 1)]


# fast_dev_run, overfit_batches, sanity check


def test_fast_dev_run_tries_everything_and_writes_nothing(tmp_path: Any) -> None:
    count = Count("on_validation_start", "on_validation_batch_start", "on_train_batch_start", "on_sanity_check_start")
    trainer = Trainer(
        accelerator="cpu",
        fast_dev_run=2,
        callbacks=[count, ModelCheckpoint(dirpath=tmp_path / "checkpoints")],
        logger=CSVLogger(tmp_path),
        val_check_interval=4,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Weight(), ones(8), ones(8))
    assert {name: len(steps) for name, steps in count.steps.items()} == {
        "on_validation_start": 1,
        "on_validation_batch_start": 2,
        "on_train_batch_start": 2,
        "on_sanity_check_start": 0,
    }
    assert list(tmp_path.iterdir()) == []


def test_overfit_batches_takes_the_same_batches_unshuffled_in_each_epoch() -> None:
    task = Weight()
    loader = rows(range(8), 2, shuffle=True)
    with pytest.warns(UserWarning, match="shuffling is turned off"):
        fitted(task, loader, overfit_batches=2, max_epochs=3)
    assert [batch[2] for batch in task.batches] == [0.0, 2.0] * 3


class Queries(Sampler[dict[str, int]]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter([{"index": index} for index in torch.randperm(8).tolist()])


class ByQuery(Dataset[Tensor]):
    def __getitem__(self, query: dict[str, int]) -> Tensor:
        return torch.tensor([float(query["index"])])


class Renamed(DataLoader[Any]):
    """A subclass that takes other arguments than torch's loader."""

    def __init__(self, size: int) -> None:
        super().__init__(rows(range(8)).dataset, size, shuffle=True, timeout=30, num_workers=1, prefetch_factor=7)


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("name", ["subset", "weighted", "queries", "part of the data"])
def test_overfit_batches_takes_what_the_sampler_gives_first_in_each_epoch(name: str, own_generator: bool) -> None:
    generator = torch.Generator().manual_seed(2) if own_generator else None
    data = rows(range(8)).dataset
    samplers = {
        "subset": SubsetRandomSampler(range(4, 8), generator),
        "weighted": WeightedRandomSampler([0.0] * 4 + [1.0] * 4, 8, generator=generator),
        "queries": Queries(),
        "part of the data": RandomSampler(range(4), generator=generator),
    }
    loader = DataLoader(ByQuery() if name == "queries" else data, batch_size=2, sampler=samplers[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = [batch[2] for batch in drawn_by(loader).batches]
        assert [batch[2] for batch in drawn_by(loader).batches] == seen
    assert seen == seen[:2] * 3
    lowest = {"subset": 4.0, "weighted": 4.0}.get(name, 0.0)
    assert all(lowest <= value < (4.0 if name == "part of the data" else 8.0) for value in seen)


def drawn_by(loader: DataLoader[Any]) -> Weight:
    task = Weight()
    fitted(task, loader, overfit_batches=2, max_epochs=3, limit_val_batches=0)
    return task


def test_overfit_batches_keeps_the_loaders_class_and_options() -> None:
    given = Renamed(2)
    with pytest.warns(UserWarning, match="requested to overfit but enabled train dataloader shuffling"):
        trainer = fitted(Weight(), given, overfit_batches=2, max_epochs=1, limit_val_batches=0)
    used = trainer.train_dataloader
    assert type(used) is Renamed
    assert (used.timeout, used.num_workers, used.prefetch_factor) == (30, 1, 7)
    assert isinstance(used.sampler, SequentialSampler)
    assert isinstance(given.sampler, RandomSampler)  # the user's own loader is as it was


def test_overfit_batches_validates_on_the_same_batches_in_each_epoch() -> None:
    loader = rows(range(8), 2, shuffle=True)
    with pytest.warns(UserWarning, match="enabled val dataloader shuffling"):
        trainer = fitted(Weight(), rows(range(8), 2), loader, overfit_batches=2, max_epochs=1)
    assert isinstance(trainer.val_dataloaders.sampler, SequentialSampler)


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (1, 1), (2, 2), (None, 2), (-1, 5), (9, 5)])
def test_the_sanity_check_runs_some_validation_batches_before_training(steps: int | None, batches: int) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    class Noting(Weight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)
            if self.trainer.global_step == 0:
                seen.append((self.trainer.sanity_checking, self.trainer.validating, self.training))

        def on_train_start(self) -> None:
            assert "val_loss" not in self.trainer.callback_metrics
            assert not self.trainer.sanity_checking

    fitted(Noting(), ones(2), ones(5), num_sanity_val_steps=steps)
    assert seen == [(True, False, False)] * batches


MONITORS = (
    "LearningRateMonitor",
    "SpeedMonitor",
    "GradientNorm",
    "DeviceStatsMonitor",
    "MemoryMonitor",
    "WeightHistograms",
    "ThroughputMonitor",
    "StragglerMonitor",
)


@pytest.mark.parametrize("quiet_by", ["fast_dev_run", "barebones"])
@pytest.mark.parametrize("name", MONITORS)
def test_a_monitor_runs_where_nothing_is_logged(name: str, quiet_by: str, tmp_path: Any) -> None:
    options = {"batch_size_fn": len} if name == "ThroughputMonitor" else {}
    monitor = getattr(drivetrain, name)(**options)
    options = {quiet_by: True, "max_epochs": 1, "callbacks": monitor, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", logger=None if quiet_by == "barebones" else "csv", **options)
    trainer.fit(Weight(), ones(2), ones(1))
    assert trainer.global_step == (1 if quiet_by == "fast_dev_run" else 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("logger", [None, True, "tensorboard", False])
def test_a_task_that_uses_its_logger_runs_in_a_trial_run(logger: Any, tmp_path: Any) -> None:
    """As with the logger that the real run has; without one in a Trainer that has none either."""

    class Logs(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.logger is not None:
                self.logger.experiment.add_image("image", batch[0], self.global_step)
                self.logger.experiment["train/loss"].append(1.0)
                self.logger.log_metrics({"loss": 1.0})
            return super().training_step(batch, batch_idx)

    trainer = Trainer(accelerator="cpu", fast_dev_run=2, logger=logger, default_root_dir=tmp_path)
    trainer.fit(Logs(), ones(3))
    assert trainer.global_step == 2
    assert bool(trainer.loggers) is (logger is not False)
    assert list(tmp_path.iterdir()) == []


def test_barebones_leaves_everything_around_the_loop_out() -> None:
    count = Count("on_sanity_check_start")
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, callbacks=count)
    trainer.fit(Weight(), ones(2), ones(2))
    assert trainer.callbacks == [count]
    assert (trainer.loggers, trainer.log_every_n_steps, count["on_sanity_check_start"]) == ([], 0, 0)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 3}, 12),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 6),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": -1, "max_steps": 7}, 7),
    ],
)
def test_the_steps_to_come_are_known_where_schedules_are_built(options, steps):
    class Scheduled(Task):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            self.announced = self.trainer.estimated_stepping_batches
            self.epoch_length = self.trainer.num_training_batches
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task = Scheduled()
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(task, torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=2))
    assert task.announced == trainer.global_step == steps
    assert task.epoch_length == trainer.num_training_batches


class Reads(Weight):
    """Counts the batches of each evaluation loader."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def _count(self, dataloader_idx: int) -> None:
        self.read += [0] * (dataloader_idx + 1 - len(self.read))
        self.read[dataloader_idx] += 1

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._count(dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._count(dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self._count(dataloader_idx)
        return batch[0]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("limit", "read"),
    [(2, [2, 2, 2]), ([1, 0.5, None], [1, 3, 4]), ([4, 0, 1], [4, 0, 1]), ({"b": 1}, [4, 1, 4]), ({}, [4, 6, 4])],
    ids=str,
)
def test_each_evaluation_loader_can_have_a_limit_of_its_own(stage: str, limit: Any, read: list[int]) -> None:
    loaders: Any = {"a": ones(4), "b": ones(6), "c": ones(4)}
    name = {"validate": "val"}.get(stage, stage)
    trainer, task = quiet(**{f"limit_{name}_batches": limit}), Reads()
    getattr(trainer, stage)(task, loaders if isinstance(limit, dict) else list(loaders.values()))
    assert task.read == read


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ([1, 2], r"limit_val_batches has 2 limits for 3 loaders. Give one per loader."),
        ({"d": 1}, r"limit_val_batches has the key 'd', but the loaders are 'a', 'b', 'c'."),
    ],
)
def test_limits_that_do_not_fit_the_loaders_are_refused(limit: Any, message: str) -> None:
    loaders = {"a": ones(4), "b": ones(6), "c": ones(4)}
    with pytest.raises(ConfigurationError, match=message):
        quiet(limit_val_batches=limit).validate(Reads(), loaders)


def test_limits_by_name_need_loaders_with_names() -> None:
    with pytest.raises(ConfigurationError, match="limit_val_batches is a dict, so the loaders must be a dict"):
        quiet(limit_val_batches={"a": 1}).validate(Reads(), [ones(4)])


@pytest.mark.parametrize("limit", [[1, -1], {"a": 1.5}, [True]])
def test_each_limit_of_a_loader_is_checked(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="or a list or dict with one per loader"):
        quiet(limit_test_batches=limit)
    with pytest.raises(ConfigurationError, match="invalid value limit_train_batches"):
        quiet(limit_train_batches=[1])
