"""Loops and metrics of a Trainer under Lightning's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.callbacks.base import Stage
from drivetrain.compat.handed_on import AbsentNameError
from drivetrain.compat.lightning.pytorch.utilities.parsing import clean_namespace
from drivetrain.compat.lightning.reasons import INTERNAL
from drivetrain.trainer.given_hyper_parameters import CLASS_PATH
from drivetrain.trainer.hyper_parameters import without_modules
from drivetrain.trainer.metrics.logged_values import (
    EpochValue,
    LoggedValue,
    LoggedValues,
    LogScope,
    Value,
    moment_of,
)
from drivetrain.trainer.metrics.tracker_log import TrackerLog
from drivetrain.trainer.metrics.transfer import to_numbers

if TYPE_CHECKING:
    from drivetrain.compat.lightning.pytorch.trainer.trainer import Trainer

# `trainer.callback_metrics` and similar attributes


class CallbackMetrics(dict[str, Tensor]):
    """Dict of the metrics for callbacks. Values that a script assigns are visible to callbacks too."""

    def __init__(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        super().__init__({name: as_tensor(value) for name, value in values.items()})
        self._trainer = trainer

    def __setitem__(self, name: str, value: Any) -> None:
        self._trainer.logged.remember({name: float(value)})
        super().__setitem__(name, as_tensor(value))

    def update(self, *args: Any, **values: Any) -> None:
        """Assign several values."""
        for name, value in dict(*args, **values).items():
            self[name] = value


def as_tensor(value: Any) -> Tensor:
    """Return a value as a scalar tensor of torch's default dtype."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value))
    return value.to(torch.get_default_dtype()) if value.dtype is torch.float64 else value


def _check_same(task: Any, data: Any) -> None:
    """Raise if a task and a data module log different values for the same hyper-parameter."""
    if data is None or not all(each.__dict__.get("_log_hyperparams", True) for each in (task, data)):
        return
    both = [name for name in task.hparams.keys() & data.hparams.keys() if name != CLASS_PATH]
    different = sorted(str(name) for name in both if not _is_equal(task.hparams[name], data.hparams[name]))
    if different:
        raise RuntimeError(
            f"Error while merging hparams: {', '.join(different)} are hyper-parameters of {type(task).__name__} and of "
            f"{type(data).__name__}, with different values. Give one of them another name, or "
            "save_hyperparameters(logger=False)."
        )


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one is other or bool(one == other)


class LightningLoggedValues(LoggedValues):
    """Logged values that keep a name logged per step and per epoch as two separate values."""

    def group_of(self, scope: LogScope) -> tuple[Any, ...]:
        return (*super().group_of(scope), scope.has_batch)

    def key_beside(self, known: LoggedValue, entry: LoggedValue) -> str:
        if known.scope.has_batch is entry.scope.has_batch:
            return super().key_beside(known, entry)
        return f"{entry.name} of the {moment_of(entry.scope)}"

    def value_of(self, name: str, metric: Any, computed: Any) -> Value | None:
        """Return a metric's value, or None if it is a dict or a list."""
        if not isinstance(computed, Tensor | int | float):
            return None
        return super().value_of(name, metric, computed)

    def finish_epoch(self, stage: str, task: nn.Module, keep: bool = True) -> list[EpochValue]:
        results = super().finish_epoch(stage, task, keep)
        names = {result.epoch_name for result in results}
        for entry in self.values_of(stage):
            if entry.on_step and entry.step_name in names:  # the epoch's value is newer until the next step
                entry.last = None
        return results


class LightningTrackerLog(TrackerLog):
    """Tracker log that numbers optimizer steps from 0. Values of evaluation steps get no epoch."""

    _is_evaluation_step = False

    def __init__(self, trainer: Any, shows_hyper_parameters: bool) -> None:
        super().__init__(trainer)
        self._shows_hyper_parameters = shows_hyper_parameters

    def write_evaluation_step(self) -> None:
        self._is_evaluation_step = True
        try:
            super().write_evaluation_step()
        finally:
            self._is_evaluation_step = False

    def finish_epoch(self, stage: Stage, keep: bool = True) -> list[EpochValue]:
        """Record an epoch's values as written before its end hooks run, where scripts read them."""
        results = super().finish_epoch(stage, keep)
        if keep:
            self.written.update(to_numbers({each.epoch_name: each.value for each in results if each.logger}))
        return results

    def begin_run(self, task: Any) -> None:
        data = self.trainer.datamodule
        for owner in (task, data):
            clean_namespace({} if owner is None else owner.hparams)
        _check_same(task, data)
        super().begin_run(task)
        trainer: Any = self.trainer
        trainer.begin_training(task)

    def hyper_parameters_of(self, owner: Any) -> Mapping[str, Any]:
        return without_modules(owner.hparams_initial) if self._shows_hyper_parameters else {}

    @staticmethod
    def name_of(result: EpochValue) -> str:
        return result.epoch_name

    def write(self, values: Mapping[str, float], step: int) -> None:
        group = self.trainer.tracker_group
        if not self._is_evaluation_step:
            fits = self.trainer.task_run.stage is Stage.TRAIN
            super().write(values, max(step - 1, 0) if fits else step)
        elif group.writes_here:
            self.written.update(values)
            group.log(values, step)


# `trainer.fit_loop` and its counters: views of the run's state

Read = Callable[[], float]


class Count:
    """Counter of one unit, such as batches: how many were ready and completed."""

    def __init__(self, ready: Read, completed: Read, write: Callable[[int], None] | None = None) -> None:
        self._ready, self._completed, self._write = ready, completed, write

    @property
    def ready(self) -> int:
        """Number that were begun."""
        return int(self._ready())

    @ready.setter
    def ready(self, value: int) -> None:
        if self._write is None:
            raise AbsentNameError(f"This counter cannot be set. {INTERNAL}")

    @property
    def completed(self) -> int:
        """Number that were completed."""
        return int(self._completed())

    @completed.setter
    def completed(self, value: int) -> None:
        if self._write is None:
            raise AbsentNameError(f"This counter cannot be set. {INTERNAL}")
        self._write(value)

    started, processed = ready, completed


class Counts:
    """Counters of the current pass and of the whole run."""

    def __init__(self, current: Count, total: Count, is_last_batch: Callable[[], bool] = lambda: False) -> None:
        self.current, self.total = current, total
        self._is_last = is_last_batch

    @property
    def is_last_batch(self) -> bool:
        """True if the last batch is running."""
        return self._is_last()


class _Steps:
    """`optim_progress`: counters of the optimizer steps."""

    def __init__(self, trainer: Trainer) -> None:
        progress = trainer.progress

        def write(value: int) -> None:
            progress.global_step = value

        count = Count(lambda: progress.global_step, lambda: progress.global_step, write)
        self.step = Counts(count, count)
        self.optimizer = self
        self.optim_progress = self

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps."""
        return self.step.total.completed


class DataSourceView:
    """Source of a loop's data loaders."""

    def __init__(self, trainer: Trainer, stage: Stage) -> None:
        self._trainer, self._stage = trainer, stage

    def is_defined(self) -> bool:
        """Return True if loaders were given, or if a hook creates them."""
        source = self._trainer.task_run.sources.get(self._stage)
        return source is not None and source.is_defined()


class EvaluationLoopView:
    """Loop of validation, test or prediction."""

    def __init__(self, trainer: Trainer, stage: Stage, alone: bool = True) -> None:
        self._trainer, self._stage = trainer, stage
        done: Read = lambda: trainer.logged.evaluated.total(str(stage), alone)  # noqa: E731 - read twice
        last: Read = lambda: min(done(), sum(self.max_batches[-1:]))  # noqa: E731 - read twice

        def total() -> float:
            # Within fit, the total starts again with each epoch.
            return done() - (0 if alone else getattr(trainer.loop, "validated_before", 0))

        self.batch_progress = Counts(Count(last, last), Count(total, total))

    @property
    def trainer(self) -> Trainer:
        """The Trainer."""
        return self._trainer

    @property
    def max_batches(self) -> list[float]:
        """Number of batches of each loader."""
        return self._trainer.current.evaluation_batches.get(self._stage, [])

    @property
    def num_dataloaders(self) -> int:
        """Number of loaders."""
        return len(self.max_batches)

    @property
    def predictions(self) -> list[Any]:
        """Results of the last `predict`."""
        return self._trainer.predictions

    @property
    def return_predictions(self) -> bool:
        """True if the last `predict` returned its results."""
        return self._trainer.keeps_predictions

    @property
    def _data_source(self) -> DataSourceView:
        return DataSourceView(self._trainer, self._stage)

    @property
    def inference_mode(self) -> bool:
        """True if the loop runs under `torch.inference_mode`."""
        return self._trainer.inference_mode

    @property
    def skip(self) -> bool:
        """True if there are no batches."""
        return sum(self.max_batches) == 0


class EpochLoopView:
    """Loop over the batches of a training epoch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        progress = trainer.progress
        current = Count(self._begun, self._finished)
        total = Count(lambda: progress.total_batches + self._begun() - self._finished(), lambda: progress.total_batches)
        self.batch_progress = Counts(current, total, lambda: trainer.is_last_batch)
        self.automatic_optimization = self.manual_optimization = _Steps(trainer)
        self.val_loop = EvaluationLoopView(trainer, Stage.VALIDATE, alone=False)

    def _begun(self) -> float:
        """Return the number of batches begun in this epoch, or in the last one before it starts."""
        current = self._trainer.current
        if current.stage is Stage.TRAIN and current.batch_info is not None:
            return current.batch_info.index + 1
        return self._trainer.progress.batches_in_epoch or current.last_epoch[0]

    def _finished(self) -> float:
        """Return the number of batches finished in this epoch, or in the last one before it starts."""
        current, finished = self._trainer.current, self._trainer.progress.batches_in_epoch
        is_under_way = current.stage is Stage.TRAIN and current.batch_info is not None
        return finished if finished or is_under_way else current.last_epoch[1]

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch."""
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch in the run."""
        return self.batch_progress.total.ready - 1

    @property
    def global_step(self) -> int:
        """Number of optimizer steps."""
        return self._trainer.global_step

    @property
    def _batches_that_stepped(self) -> int:
        """Step number for loggers. It stays that of the previous batch until the current batch ends."""
        trainer, current = self._trainer, self._trainer.current
        is_under_way = current.stage is Stage.TRAIN and current.batch_info is not None
        has_stepped = is_under_way and not trainer.accelerator.optimizer_step.is_open
        return max(trainer.global_step - has_stepped, 0)

    def _should_accumulate(self) -> bool:
        batches, trainer = self.batch_progress.current.ready, self._trainer
        return batches % trainer.accumulate_grad_batches != 0 and batches < trainer.num_training_batches

    @property
    def min_steps(self) -> int | None:
        """Minimum number of steps, or None."""
        return self._trainer.min_steps

    @min_steps.setter
    def min_steps(self, value: int | None) -> None:
        self._trainer.change_options(min_steps=value)

    @property
    def max_steps(self) -> int:
        """Maximum number of steps, -1 for no limit."""
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._trainer.change_options(max_steps=value)


class FitLoopView:
    """Loop over epochs. It exists before the first `fit`, and its limits can be assigned."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        progress = trainer.progress

        def write(value: int) -> None:
            progress.epoch = value

        count = Count(self._begun, lambda: trainer.current_epoch, write)
        self.epoch_progress = Counts(count, count)
        self.epoch_loop = EpochLoopView(trainer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"Lightning's fit_loop.{name} is not here. {INTERNAL}", name=name, obj=self)

    def _begun(self) -> float:
        trainer = self._trainer
        return trainer.current_epoch + (trainer.task_run.stage is Stage.TRAIN and trainer.stage is not None)

    @property
    def trainer(self) -> Trainer:
        """The Trainer."""
        return self._trainer

    @property
    def max_epochs(self) -> int | None:
        """Maximum number of epochs, -1 for no limit, or None."""
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._trainer.limit_epochs(value)

    @property
    def min_epochs(self) -> int | None:
        """Minimum number of epochs, or None."""
        return self._trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self._trainer.change_options(min_epochs=value)

    @property
    def min_steps(self) -> int | None:
        """Minimum number of steps, or None."""
        return self.epoch_loop.min_steps

    @property
    def max_steps(self) -> int:
        """Maximum number of steps, -1 for no limit."""
        return self.epoch_loop.max_steps

    @property
    def max_batches(self) -> float:
        """Number of batches in an epoch."""
        return self._trainer.num_training_batches

    def _should_accumulate(self) -> bool:
        return self.epoch_loop._should_accumulate()

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch in the run."""
        return self.epoch_loop.total_batch_idx

    @property
    def global_step(self) -> int:
        """Number of optimizer steps."""
        return self._trainer.global_step

    @property
    def done(self) -> bool:
        """True if a limit of epochs or steps is reached."""
        trainer = self._trainer
        epochs, steps = trainer.options.max_epochs, trainer.max_steps
        return 0 <= epochs <= trainer.current_epoch or 0 <= steps <= trainer.global_step

    @property
    def restarting(self) -> bool:
        """Always False: a resume is over before scripts can read this."""
        return False

    @property
    def skip(self) -> bool:
        """True if there is nothing to train."""
        return self.done or self._trainer.limit_train_batches == 0

    @property
    def _data_source(self) -> DataSourceView:
        return DataSourceView(self._trainer, Stage.TRAIN)


class ConnectorView:
    """Read-only view of one of Lightning's private Trainer parts."""

    def __init__(self, name: str, **read: Callable[[], Any]) -> None:
        self._name, self._read = name, read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._read:
            raise AttributeError(f"Lightning's {self._name}.{name} is not here. {INTERNAL}", name=name, obj=self)
        return self._read[name]()


def is_logging_due(trainer: Trainer) -> bool:
    """Return True if the loggers receive the values of the current batch."""
    every: Any = trainer.log_every_n_steps
    if not isinstance(every, int) or not every or trainer.stage is None:
        return bool(every)
    if trainer.stage is Stage.TRAIN:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
    else:
        step = trainer.current.batch_info.index + 1 if trainer.current.batch_info is not None else 0
    return bool(step % every == 0 or trainer.should_stop)
