"""The loops and the metrics of a Trainer, as Lightning's scripts read them."""

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

# `trainer.callback_metrics` and its like as Lightning's scripts read them.


class CallbackMetrics(dict[str, Tensor]):
    """The values that callbacks see; what is written into it, they see too."""

    def __init__(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        super().__init__({name: as_tensor(value) for name, value in values.items()})
        self._trainer = trainer

    def __setitem__(self, name: str, value: Any) -> None:
        self._trainer.logged.remember({name: float(value)})
        super().__setitem__(name, as_tensor(value))

    def update(self, *args: Any, **values: Any) -> None:
        """Write several values."""
        for name, value in dict(*args, **values).items():
            self[name] = value


def as_tensor(value: Any) -> Tensor:
    """A value as a scalar of the usual kind of float."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value))
    return value.to(torch.get_default_dtype()) if value.dtype is torch.float64 else value


def _check_same(task: Any, data: Any) -> None:
    """Refuse a task and a data module that both log a hyper-parameter of one name, with different values."""
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
    """Logged values, of which one name may be logged both by steps and where an epoch begins or ends, as two values."""

    def group_of(self, scope: LogScope) -> tuple[Any, ...]:
        return (*super().group_of(scope), scope.has_batch)

    def key_beside(self, known: LoggedValue, entry: LoggedValue) -> str:
        if known.scope.has_batch is entry.scope.has_batch:
            return super().key_beside(known, entry)
        return f"{entry.name} of the {moment_of(entry.scope)}"

    def value_of(self, name: str, metric: Any, computed: Any) -> Value | None:
        """Return a metric's value, or None for a dict or a list of values."""
        if not isinstance(computed, Tensor | int | float):
            return None
        return super().value_of(name, metric, computed)

    def finish_epoch(self, stage: str, task: nn.Module, keep: bool = True) -> list[EpochValue]:
        results = super().finish_epoch(stage, task, keep)
        names = {result.epoch_name for result in results}
        for entry in self.values_of(stage):
            if entry.on_step and entry.step_name in names:  # the epoch's is newer, until the next step
                entry.last = None
        return results


class LightningTrackerLog(TrackerLog):
    """Counts optimizer steps from 0 for loggers, as Lightning does; an evaluation step's values come without epoch."""

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
        """Count an epoch's values as written: the hooks of its end, which come before, read them there."""
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


# `trainer.fit_loop` and its counters as Lightning's scripts read them: views of the run's own.

Read = Callable[[], float]


class Count:
    """How many of something there were, by how far each came."""

    def __init__(self, ready: Read, completed: Read, write: Callable[[int], None] | None = None) -> None:
        self._ready, self._completed, self._write = ready, completed, write

    @property
    def ready(self) -> int:
        """How many were begun: as many as are over where that is set."""
        return int(self._ready())

    @ready.setter
    def ready(self, value: int) -> None:
        if self._write is None:
            raise AbsentNameError(f"This counter cannot be set. {INTERNAL}")

    @property
    def completed(self) -> int:
        """How many are over."""
        return int(self._completed())

    @completed.setter
    def completed(self, value: int) -> None:
        if self._write is None:
            raise AbsentNameError(f"This counter cannot be set. {INTERNAL}")
        self._write(value)

    started, processed = ready, completed


class Counts:
    """A counter of the pass under way, and of the whole run."""

    def __init__(self, current: Count, total: Count, is_last_batch: Callable[[], bool] = lambda: False) -> None:
        self.current, self.total = current, total
        self._is_last = is_last_batch

    @property
    def is_last_batch(self) -> bool:
        """Whether the last batch is under way."""
        return self._is_last()


class _Steps:
    """`optim_progress`: how often optimizers stepped."""

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
        """Steps in all."""
        return self.step.total.completed


class DataSourceView:
    """Where a loop gets its loaders from."""

    def __init__(self, trainer: Trainer, stage: Stage) -> None:
        self._trainer, self._stage = trainer, stage

    def is_defined(self) -> bool:
        """Whether the verb under way, or the last one, was given loaders or has a hook that makes them."""
        source = self._trainer.task_run.sources.get(self._stage)
        return source is not None and source.is_defined()


class EvaluationLoopView:
    """A loop that validates, tests or predicts."""

    def __init__(self, trainer: Trainer, stage: Stage, alone: bool = True) -> None:
        self._trainer, self._stage = trainer, stage
        done: Read = lambda: trainer.logged.evaluated.total(str(stage), alone)  # noqa: E731 - read twice
        last: Read = lambda: min(done(), sum(self.max_batches[-1:]))  # noqa: E731 - read twice
        self.batch_progress = Counts(Count(last, last), Count(done, done))

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        return self._trainer

    @property
    def max_batches(self) -> list[float]:
        """Batches of each loader."""
        return self._trainer.current.evaluation_batches.get(self._stage, [])

    @property
    def num_dataloaders(self) -> int:
        """How many loaders there are."""
        return len(self.max_batches)

    @property
    def predictions(self) -> list[Any]:
        """What the last `predict` has returned."""
        return self._trainer.predictions

    @property
    def return_predictions(self) -> bool:
        """Whether the last `predict` has returned them."""
        return self._trainer.keeps_predictions

    @property
    def _data_source(self) -> DataSourceView:
        return DataSourceView(self._trainer, self._stage)

    @property
    def inference_mode(self) -> bool:
        """Whether it runs under `torch.inference_mode`."""
        return self._trainer.inference_mode

    @property
    def skip(self) -> bool:
        """Whether there is nothing to do."""
        return sum(self.max_batches) == 0


class EpochLoopView:
    """The loop over the batches of an epoch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        progress = trainer.progress
        current = Count(self._begun, self._finished)
        total = Count(lambda: progress.total_batches + self._begun() - self._finished(), lambda: progress.total_batches)
        self.batch_progress = Counts(current, total, lambda: trainer.is_last_batch)
        self.automatic_optimization = self.manual_optimization = _Steps(trainer)
        self.val_loop = EvaluationLoopView(trainer, Stage.VALIDATE, alone=False)

    def _begun(self) -> float:
        """Batches of this epoch that were begun; until its first, those of the last one."""
        current = self._trainer.current
        if current.stage is Stage.TRAIN and current.batch_info is not None:
            return current.batch_info.index + 1
        return self._trainer.progress.batches_in_epoch or current.last_epoch[0]

    def _finished(self) -> float:
        """The same of those that were finished."""
        current, finished = self._trainer.current, self._trainer.progress.batches_in_epoch
        is_under_way = current.stage is Stage.TRAIN and current.batch_info is not None
        return finished if finished or is_under_way else current.last_epoch[1]

    @property
    def batch_idx(self) -> int:
        """The number of the batch under way in its epoch."""
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """Its number in the run."""
        return self.batch_progress.total.ready - 1

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self._trainer.global_step

    @property
    def _batches_that_stepped(self) -> int:
        """The step under which loggers write: until a batch is over, that before its own."""
        trainer, current = self._trainer, self._trainer.current
        is_under_way = current.stage is Stage.TRAIN and current.batch_info is not None
        has_stepped = is_under_way and not trainer.accelerator.optimizer_step.is_open
        return max(trainer.global_step - has_stepped, 0)

    def _should_accumulate(self) -> bool:
        batches, trainer = self.batch_progress.current.ready, self._trainer
        return batches % trainer.accumulate_grad_batches != 0 and batches < trainer.num_training_batches

    @property
    def min_steps(self) -> int | None:
        """Steps that are taken at least."""
        return self._trainer.min_steps

    @min_steps.setter
    def min_steps(self, value: int | None) -> None:
        self._trainer.change_options(min_steps=value)

    @property
    def max_steps(self) -> int:
        """Steps that are taken at most; -1 for any number."""
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._trainer.change_options(max_steps=value)


class FitLoopView:
    """The loop over epochs, there before the first `fit` too. Its limits can be set, as those of the Trainer."""

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
        """The trainer."""
        return self._trainer

    @property
    def max_epochs(self) -> int | None:
        """Epochs that are trained at most; -1 for any number."""
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._trainer.limit_epochs(value)

    @property
    def min_epochs(self) -> int | None:
        """Epochs that are trained at least."""
        return self._trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self._trainer.change_options(min_epochs=value)

    @property
    def min_steps(self) -> int | None:
        """Steps that are taken at least."""
        return self.epoch_loop.min_steps

    @property
    def max_steps(self) -> int:
        """Steps that are taken at most; -1 for any number."""
        return self.epoch_loop.max_steps

    @property
    def max_batches(self) -> float:
        """Batches of an epoch."""
        return self._trainer.num_training_batches

    def _should_accumulate(self) -> bool:
        return self.epoch_loop._should_accumulate()

    @property
    def batch_idx(self) -> int:
        """The number of the batch under way in its epoch."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Its number in the run."""
        return self.epoch_loop.total_batch_idx

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self._trainer.global_step

    @property
    def done(self) -> bool:
        """Whether a limit is reached."""
        trainer = self._trainer
        epochs, steps = trainer.options.max_epochs, trainer.max_steps
        return 0 <= epochs <= trainer.current_epoch or 0 <= steps <= trainer.global_step

    @property
    def restarting(self) -> bool:
        """Whether a checkpoint is being resumed: never seen from outside."""
        return False

    @property
    def skip(self) -> bool:
        """Whether there is nothing to train on."""
        return self.done or self._trainer.limit_train_batches == 0

    @property
    def _data_source(self) -> DataSourceView:
        return DataSourceView(self._trainer, Stage.TRAIN)


class ConnectorView:
    """A part of Lightning's Trainer that scripts read of, as a view of what the run has."""

    def __init__(self, name: str, **read: Callable[[], Any]) -> None:
        self._name, self._read = name, read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._read:
            raise AttributeError(f"Lightning's {self._name}.{name} is not here. {INTERNAL}", name=name, obj=self)
        return self._read[name]()


def is_logging_due(trainer: Trainer) -> bool:
    """Whether the values of the batch under way reach the loggers."""
    every: Any = trainer.log_every_n_steps
    if not isinstance(every, int) or not every or trainer.stage is None:
        return bool(every)
    if trainer.stage is Stage.TRAIN:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
    else:
        step = trainer.current.batch_info.index + 1 if trainer.current.batch_info is not None else 0
    return bool(step % every == 0 or trainer.should_stop)
