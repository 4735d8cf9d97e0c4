"""How many samples and tokens a run has trained on, over all processes; and what parts of a run come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.data import BatchInfo, PendingBatch
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.durations import Duration, Unit
from drivetrain.runtime.errors import ConfigurationError, DataError
from drivetrain.runtime.nested import recursively_apply

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

FOREVER = float("inf")


def duration_in_run(trainer: Trainer, duration: Duration, name: str) -> Duration:
    """A duration in steps, samples, tokens or seconds, where it is a part of the run.

    Args:
        trainer: The trainer, within `fit`.
        duration: The duration.
        name: What it was given as, for errors.

    Raises:
        ConfigurationError: The run's length is not known.
    """
    if duration.unit is not Unit.RUN:
        return duration
    if trainer.max_duration is not None:
        return duration.part_of(trainer.max_duration)
    steps = trainer.estimated_stepping_batches
    if steps != FOREVER:
        return duration.part_of(Duration(int(steps), Unit.STEPS))
    if trainer.max_time is not None:
        return duration.part_of(Duration(trainer.max_time.total_seconds(), Unit.SECONDS))
    raise ConfigurationError(
        f"{name} is {duration}, but how long that is is not known. Give the Trainer an end (max_duration, max_epochs, "
        "max_steps or max_time), or a duration in steps, samples or seconds.",
        code="DT-096",
    )


def validation_interval(trainer: Trainer) -> int | float | timedelta | Duration | None:
    """How often a run is validated; a part of the run in steps, samples, tokens or a time."""
    interval = trainer.val_check_interval
    if not isinstance(interval, Duration):
        return interval
    settled = duration_in_run(trainer, interval, "val_check_interval")
    return settled.timedelta if settled.unit is Unit.SECONDS else settled


def counters(trainer: Trainer, task: Task) -> list[_Samples | _Tokens]:
    """What counts the samples and tokens of each window, where anything of the run is measured in them.

    Args:
        trainer: The trainer.
        task: Its task.

    Raises:
        ConfigurationError: The run that is resumed has not counted them.
    """
    units = _units_in_use(trainer)
    progress = trainer.progress
    found: list[_Samples | _Tokens] = []
    kinds: tuple[tuple[Unit, type[_Samples | _Tokens]], ...] = ((Unit.SAMPLES, _Samples), (Unit.TOKENS, _Tokens))
    for unit, kind in kinds:
        if unit not in units:
            progress.forget(unit)
        elif progress.total_batches and not progress.count(unit):
            raise ConfigurationError(
                f"Something of this run is measured in {unit}, but its first {progress.global_step} steps have not "
                f"counted any: nothing was measured in {unit} then. Measure in steps, epochs or time.",
                code="DT-096",
            )
        else:
            found.append(kind(trainer, task))
    return found


def _units_in_use(trainer: Trainer) -> set[Unit]:
    """What anything of the run is measured in, beside numbers of steps."""
    given: list[Any] = [trainer.max_duration, trainer.val_check_interval, trainer.log_every_n_steps]
    given += [config.frequency for config in trainer.lr_scheduler_configs]
    for callback in trainer.callbacks:
        given += callback.rhythm if isinstance(callback.rhythm, tuple) else [callback.rhythm]
    return {each.unit for each in given if isinstance(each, Duration)}


class Foresight:
    """What is known of a step before it is taken, where anything is measured in epochs, samples or tokens.

    Args:
        trainer: The trainer.
        units: What is counted: samples, tokens or both.
    """

    def __init__(self, trainer: Trainer, units: Sequence[Unit]) -> None:
        self._current, self._progress = trainer.current, trainer.progress
        self._units = units
        self._before = {unit: trainer.progress.count(unit) for unit in units}
        steps = max(1, trainer.progress.global_step)
        self._current.ahead = {unit: count // steps for unit, count in self._before.items()}

    @classmethod
    def of(cls, trainer: Trainer) -> Foresight | None:
        """The foresight that a run needs; None where nothing is measured so."""
        units = _units_in_use(trainer)
        counted = [unit for unit in (Unit.SAMPLES, Unit.TOKENS) if unit in units]
        return cls(trainer, counted) if counted or units & {Unit.EPOCHS, Unit.RUN} else None

    def begin(self, window: Sequence[PendingBatch]) -> None:
        """Record what is known of a step.

        Args:
            window: Its micro-batches.
        """
        current, last = self._current, window[-1]
        current.closes_epoch = last.info.last or last.batch_idx + 1 >= current.training_batches
        for unit in self._units:
            count = self._progress.count(unit)
            if count > self._before[unit]:
                current.ahead[unit] = count - self._before[unit]
            self._before[unit] = count
        rows = [micro_batch.info.global_rows for micro_batch in window]
        if Unit.SAMPLES in self._units and None not in rows:
            current.ahead[Unit.SAMPLES] = sum(each or 0 for each in rows)


class _Samples:
    """Counts the samples of each window: real rows, not what fills up the last batch.

    Args:
        trainer: The trainer.
        task: Its task.

    Attributes:
        note: None: nothing is counted in a batch itself.
    """

    note: None = None

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._progress = trainer.progress
        self._copies = trainer.world_size // trainer.strategy.topology.data_shard.count

    def count(self, window: Sequence[PendingBatch]) -> None:
        """Count a window; all processes together, where some rows are known to their own process only."""
        known = sum(micro_batch.info.global_rows or 0 for micro_batch in window)
        unknown = [micro_batch.info for micro_batch in window if micro_batch.info.global_rows is None]
        self._progress.samples += known + (self._exchanged(unknown) if unknown else 0)

    def _exchanged(self, infos: list[BatchInfo]) -> int:
        rows = [info.real_rows for info in infos]
        own = sum(each for each in rows if each is not None)
        total, missing = reduce(torch.tensor([own, None in rows]), "sum").tolist()
        if missing:
            raise DataError(
                "Samples cannot be counted: how many rows a batch has is not known here (a custom type of batch, or a "
                "combination of loaders with batches of different sizes). Measure in steps, epochs or time."
            )
        return int(total) // self._copies


class _Tokens:
    """Counts the tokens of each window: what `num_tokens` of the task returns, else what the losses weigh.

    Args:
        trainer: The trainer.
        task: Its task.
    """

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._task, self._progress = task, trainer.progress
        self._topology, self._weights = trainer.strategy.topology, trainer.accelerator.optimizer_step.weights
        given = getattr(task, "num_tokens", None)  # in many a task the size of its vocabulary
        self._num_tokens: Callable[[Any], int | Tensor] | None = given if callable(given) else None
        self._weights.total = None

    def count(self, window: Sequence[PendingBatch]) -> None:
        """Count a window; all processes together."""
        if self._num_tokens is None:
            self._progress.tokens += self._weighed()
            return
        for each in window:
            if not each.is_released:
                self.note(each)
        own = sum(int(each.tokens) for each in window)  # type: ignore[misc, arg-type]
        total = torch.tensor(own, device=self._topology.device)
        self._progress.tokens += int(self._topology.sum(total))

    def note(self, micro_batch: PendingBatch) -> None:
        """Count the tokens of a micro-batch, whose batch may be released then."""
        if self._num_tokens is not None:
            info = micro_batch.info
            is_real = not info.is_padding
            micro_batch.tokens = self._num_tokens(_real_rows(micro_batch.batch, info)) if is_real else 0

    def _weighed(self) -> int:
        if self._weights.in_use is False:
            raise ConfigurationError(
                f"This run is measured in tokens, but {type(self._task).__name__} gives no number of them. "
                "Define num_tokens(batch) on the task, or return {'loss': sum, 'weight': tokens} from "
                "training_step.",
                code="DT-096",
            )
        total, self._weights.total = self._weights.total, None
        return 0 if total is None else round(float(total))


def _real_rows(batch: Any, info: BatchInfo) -> Any:
    """A batch without the rows that only fill it up."""
    rows, real = info.rows, info.real_rows
    if not info.padding or rows is None or real is None:
        return batch
    return recursively_apply(partial(_cut, rows=rows, real=real), batch)


def _cut(tensor: Tensor, rows: int, real: int) -> Tensor:
    return tensor[:real] if tensor.dim() and len(tensor) == rows else tensor
