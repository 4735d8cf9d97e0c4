from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.callbacks import Callback
from drivetrain.trackers import CSVLogger
from tests.callbacks.tasks import Scripted, fit
from tests.trainer.tasks import Weight, ones, quiet, rows

INJECTED = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


class Breaks(Callback):
    """Raises the given time that a hook is called."""

    def __init__(self, hook: str, call: int) -> None:
        self.hook, self.left = hook, call
        self.torn_down = 0


def _hook(name: str) -> Any:
    def run(self: Breaks, trainer: Any, *args: Any) -> None:
        self.torn_down += name == "teardown"
        if name != self.hook or (trainer.sanity_checking and "sanity" not in name):
            return
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError(name)

    return run


for each in INJECTED:
    setattr(Breaks, each, _hook(each))


class Ends(Callback):
    """Counts how often it is torn down, and what ended the run."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
        self.ended.append(str(exception))

    def teardown(self, trainer: Any, task: Any, stage: str) -> None:
        self.ended.append(f"teardown of {stage}")


class Logs(Scripted):
    """Logs in steps, validations and at the end of epochs; keeps what of it is complete."""

    def __init__(self) -> None:
        super().__init__([1.0] * 9)
        self.kept: dict[tuple[str, int], float] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("value", 10.0 + self.trainer.global_step)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("of_the_epoch", 5.0 + self.current_epoch)
        self.kept["of_the_epoch", self.global_step] = 5.0 + self.current_epoch


class Keeps(Ends):
    """Keeps what a step has logged once it is taken, and a validation once it has seen all of its data."""

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        task.kept["value", trainer.global_step] = 9.0 + trainer.global_step

    def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
        if not trainer.sanity_checking:
            task.kept["val_loss", trainer.global_step] = 1.0


@pytest.mark.parametrize("hook", INJECTED)
def test_wherever_a_run_breaks_nothing_logged_is_lost_and_all_are_torn_down(hook: str, tmp_path: Path) -> None:
    first, breaks, last, task = Keeps(), Breaks(hook, 2 if "batch" in hook or "before" in hook else 1), Ends(), Logs()
    logger = CSVLogger(tmp_path, name=None, version="run")
    callbacks = [first, breaks, last]
    with pytest.raises(ZeroDivisionError, match=hook):
        fit(task, tmp_path, 2, callbacks, logger=logger, log_every_n_steps=1, num_sanity_val_steps=1)
    written, found = tmp_path / "run" / "metrics.csv", {}
    if written.exists() or task.kept:
        with written.open() as file:
            for row in csv.DictReader(file):
                found |= {(name, int(row["step"])): float(value) for name, value in row.items() if value}
    assert task.kept.items() <= found.items()
    assert breaks.torn_down == 1
    assert [ends.ended[-1] for ends in (first, last)] == ["teardown of fit"] * 2


def test_all_are_torn_down_where_several_raise_and_the_first_error_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, last = Breaks("teardown", 1), Breaks("teardown", 1), Ends()
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError):
        fit(Scripted([1]), tmp_path, 1, [first, second, last])
    assert (first.torn_down, second.torn_down, last.ended) == (1, 1, ["teardown of fit"])
    assert caplog.text.count("teardown raised ZeroDivisionError") == 2


def test_an_error_in_on_exception_hides_neither_the_first_one_nor_the_other_hooks(tmp_path: Path) -> None:
    class Worse(Callback):
        def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
            raise KeyError("worse")

    last = Ends()
    with pytest.raises(ZeroDivisionError, match="on_train_batch_end"):
        fit(Scripted([1]), tmp_path, 1, [Worse(), Breaks("on_train_batch_end", 1), last])
    assert last.ended == ["on_train_batch_end", "teardown of fit"]


def test_hooks_of_evaluation_batches_may_leave_the_loader_out(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Short(Callback):
        def on_validation_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            seen.append(batch_idx)

    class Task(Scripted):
        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            seen.append(torch.is_tensor(batch[0]))

    fit(Task([1]), tmp_path, 1, [Short()], num_sanity_val_steps=0, limit_val_batches=1)
    assert seen == [0, True]


@pytest.mark.parametrize(("loaders", "passed"), [(1, [(), (0,)]), (2, [(0,), (0,), (1,), (1,)])])
def test_hooks_get_the_number_of_the_loader_where_there_are_several_or_they_need_it(loaders: int, passed: Any) -> None:
    seen: list[Any] = []

    class Takes(Callback):
        def on_validation_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int, *more: int) -> None:
            seen.append(more)

    class Needs(Callback):
        def on_validation_batch_start(  # type: ignore[override]
            self, trainer: Any, task: Any, batch: Any, batch_idx: int, dataloader_idx: int
        ) -> None:
            seen.append((dataloader_idx,))

    trainer = quiet([Takes(), Needs()], limit_val_batches=1)
    trainer.validate(Weight(), [rows([1.0])] * loaders, verbose=False)
    assert seen == passed


def test_the_stage_comes_by_its_name_where_a_hook_has_it_and_else_by_its_place() -> None:
    seen: list[Any] = []

    class Named(Callback):
        def setup(self, trainer: Any, task: Any, *args: Any, **kwargs: Any) -> None:
            seen.append((args, kwargs))

    class Other(Callback):
        def setup(self, trainer: Any, task: Any, phase: str) -> None:  # type: ignore[override]
            seen.append(phase)

    quiet([Named(), Other()]).validate(Weight(), rows([1.0]), verbose=False)
    assert seen == [((), {"stage": "validate"}), "validate"]


def test_a_hook_of_the_mode_may_be_none() -> None:
    task: Any = Weight()
    task.on_validation_model_train = None
    quiet().validate(task, rows([1.0]), verbose=False)
    assert task.training


def test_a_tasks_callbacks_replace_those_of_their_class_and_of_its_bases() -> None:
    class Base(Callback):
        pass

    class Derived(Base):
        pass

    class Brings(Weight):
        def configure_callbacks(self) -> Any:
            return Derived()

    trainer = quiet(callbacks=[Callback(), Base(), Derived(), Base()])
    trainer.fit(Brings(), ones(1))
    assert [type(each) for each in trainer.callbacks] == [Callback, Derived]
