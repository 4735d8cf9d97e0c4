"""Counters and current position of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.data import BatchInfo, PendingBatch
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.durations import Duration, Unit
from drivetrain.runtime.errors import ConfigurationError, DataError, DrivetrainDeprecationWarning
from drivetrain.runtime.pytrees import find_batch_size, recursively_apply

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class Phase(IntEnum):
    """Progress of a run within a training epoch, from its batches to the last hooks at its end.

    Saved in checkpoints, so that a resumed run knows which parts of the epoch are left.

    Attributes:
        BATCHES: Batches are left to train on.
        SCHEDULED: All batches are done, and the learning rate schedulers with an epoch interval have stepped.
        DRAINED: The loader is exhausted. A last validation and the hooks of the epoch's end may follow.
        CLOSING: Only the hooks that run last are left, such as the one of `ModelCheckpoint`.
    """

    BATCHES = 0
    SCHEDULED = 1
    DRAINED = 2
    CLOSING = 3


@dataclass
class Progress:
    """Counters of a training run, such as its steps and epochs.

    They are saved in checkpoints.

    Attributes:
        global_step: Number of optimizer steps taken.
        epoch: Number of finished epochs.
        batches_in_epoch: Number of batches that this rank has consumed in the current epoch.
        total_batches: Number of batches that this rank has consumed in the whole run.
        validations: Number of finished validations.
        validated_at: `total_batches` at the last finished validation.
        due_at: `total_batches` at the last validation that was due by a time interval.
        parts: Number of parts in which each micro-batch is processed, because it does not fit into memory as a whole.
        validated_count: Steps, samples or tokens at the last validation, in the unit of `val_check_interval`.
        samples: Number of training samples over all ranks. Counted only if a setting of the run is in samples.
        tokens: Number of training tokens over all ranks. Counted only if a setting of the run is in tokens.
        phase: Progress within the current epoch.
    """

    global_step: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    total_batches: int = 0
    validations: int = 0
    validated_at: int = -1
    due_at: int = -1
    parts: int = 1
    validated_count: int = 0
    samples: int = 0
    tokens: int = 0
    phase: Phase = field(default=Phase.BATCHES)

    @property
    def batches_are_done(self) -> bool:
        return self.phase >= Phase.DRAINED

    def count(self, unit: Unit) -> int:
        """Return the run's progress in `unit`: the number of completed optimizer steps, epochs, samples or tokens."""
        value: int = getattr(self, _COUNTED[unit])
        return value

    def forget(self, unit: Unit) -> None:
        setattr(self, _COUNTED[unit], 0)

    def begin_epoch(self, epoch: int) -> None:
        """Set the index of the current epoch, and reset the counters that belong to a single epoch."""
        self.epoch = epoch
        self.batches_in_epoch = 0
        self.phase = Phase.BATCHES

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTERS} | {"phase": self.phase.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        start = Progress()  # checkpoints of older versions lack some counters
        for name in _COUNTERS:
            setattr(self, name, int(state.get(name, getattr(start, name))))
        self.phase = Phase[state["phase"]] if "phase" in state else _phase_of_booleans(state)


_COUNTED = {Unit.STEPS: "global_step", Unit.EPOCHS: "epoch", Unit.SAMPLES: "samples", Unit.TOKENS: "tokens"}
_COUNTERS = tuple(each.name for each in fields(Progress) if each.name != "phase")


def _phase_of_booleans(state: Mapping[str, Any]) -> Phase:
    # Checkpoints of older versions have these booleans in place of a phase.
    if state.get("epoch_is_ending"):
        return Phase.CLOSING
    if state.get("batches_are_done"):
        return Phase.DRAINED
    return Phase.SCHEDULED if state.get("epoch_over") else Phase.BATCHES


# The current position of a run


@dataclass(slots=True, eq=False)
class CurrentRun:
    """Current state of a run: its stage, its batch and the lengths of its loaders.

    Attributes:
        stage: The current stage, or None between two runs.
        sanity_checking: True during the short validation before training, which discards its results.
        batch: The current batch, or None between two batches.
        batch_info: The index and row counts of the current batch, as recorded by its loader.
        training_batches: Number of training batches of this rank per epoch, or infinity if unknown.
        evaluation_batches: Number of batches of this rank in each loader, per stage.
        loaders: The user's loader or loaders, per stage.
        last_epoch: Numbers of batches that the last training epoch started and finished. Both are 0 before it.
        ahead: Estimated samples and tokens of the current step. Only units that a setting of the run uses are present.
        closes_epoch: True if the current step is the last of its epoch. Set only if a setting is in epochs.
    """

    stage: Stage | None = None
    sanity_checking: bool = False
    batch: Any = None
    batch_info: BatchInfo | None = None
    training_batches: float = 0
    evaluation_batches: dict[Stage, list[float]] = field(default_factory=dict)
    loaders: dict[Stage, Any] = field(default_factory=dict)
    last_epoch: tuple[int, int] = (0, 0)
    ahead: dict[Unit, int] = field(default_factory=dict)
    closes_epoch: bool = False

    def lengths(self) -> tuple[float, dict[Stage, list[float]], tuple[int, int]]:
        return self.training_batches, self.evaluation_batches, self.last_epoch

    def adopt_lengths(self, lengths: tuple[float, dict[Stage, list[float]], tuple[int, int]]) -> None:
        self.training_batches, self.evaluation_batches, self.last_epoch = lengths

    def leave_batch(self) -> None:
        self.batch = self.batch_info = None

    def leave_epoch(self, finished: int) -> None:
        self.last_epoch = finished if self.batch_info is None else self.batch_info.index + 1, finished
        self.leave_batch()

    def leave_stage(self) -> None:
        self.leave_batch()
        self.stage, self.sanity_checking = None, False

    @contextmanager
    def within(self, stage: Stage, sanity_checking: bool = False) -> Iterator[None]:
        before = self.stage, self.sanity_checking, self.batch, self.batch_info
        self.stage, self.sanity_checking = stage, sanity_checking
        yield
        self.stage, self.sanity_checking, self.batch, self.batch_info = before

    @contextmanager
    def kept(self) -> Iterator[None]:
        # The trial steps of a search must not change these fields.
        before = {name: getattr(self, name) for name in self.__slots__ if name != "loaders"}
        before["evaluation_batches"] = dict(self.evaluation_batches)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def find_batch_size(self) -> int:
        info = self.batch_info
        if info is not None and info.rows is not None:
            return info.rows - info.padding
        return find_batch_size(self.batch)


# Counting samples and tokens


FOREVER = float("inf")


def duration_in_run(trainer: Trainer, duration: Duration, name: str) -> Duration:
    """Convert a duration that is a fraction of the run to a number of steps, samples, tokens or seconds.

    Other durations are returned unchanged. The result has the unit of `max_duration` if that is set, else it is in
    steps or else in seconds. `name` is the option's name for error messages.
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
        f"{name} is {duration}, but the length of the run is unknown. Set max_duration, max_epochs, max_steps or "
        f"max_time on the Trainer, or set {name} in steps, samples or seconds.",
    )


def validation_interval(trainer: Trainer) -> int | float | timedelta | Duration | None:
    interval = trainer.val_check_interval
    if not isinstance(interval, Duration):
        return interval
    settled = duration_in_run(trainer, interval, "val_check_interval")
    return settled.timedelta if settled.unit is Unit.SECONDS else settled


def counters(trainer: Trainer, task: Task) -> list[_Samples | _Tokens]:
    units = _units_in_use(trainer)
    progress = trainer.progress
    found: list[_Samples | _Tokens] = []
    kinds: tuple[tuple[Unit, type[_Samples | _Tokens]], ...] = ((Unit.SAMPLES, _Samples), (Unit.TOKENS, _Tokens))
    for unit, kind in kinds:
        if unit not in units:
            # A count that is not continued would be wrong if a later run resumed it.
            progress.forget(unit)
        elif progress.total_batches and not progress.count(unit):
            raise ConfigurationError(
                f"A setting of this run is in {unit}, but the run that it resumes did not count {unit} in its first "
                f"{progress.global_step} steps. Use steps, epochs or time instead.",
            )
        else:
            found.append(kind(trainer, task))
    return found


def _units_in_use(trainer: Trainer) -> set[Unit]:
    given: list[Any] = [trainer.max_duration, trainer.val_check_interval, trainer.log_every_n_steps]
    given += [config.frequency for config in trainer.lr_scheduler_configs]
    for callback in trainer.callbacks:
        schedule: Any = callback.schedule
        if type(callback).rhythm is not Callback.rhythm:  # the class overrides the deprecated name
            message = f"{type(callback).__name__}.rhythm is deprecated since drivetrain 0.1.0. Use schedule."
            warnings.warn(message, DrivetrainDeprecationWarning, stacklevel=2)
            schedule = callback.rhythm
        given += schedule if isinstance(schedule, tuple) else [schedule]
    return {each.unit for each in given if isinstance(each, Duration)}


class Foresight:
    """Predicts how many samples and tokens the next step will process, for intervals given in these units.

    Also detects the last step of an epoch.
    """

    def __init__(self, trainer: Trainer, units: Sequence[Unit]) -> None:
        self._current, self._progress = trainer.current, trainer.progress
        self._units = units
        self._before = {unit: trainer.progress.count(unit) for unit in units}
        steps = max(1, trainer.progress.global_step)
        self._current.ahead = {unit: count // steps for unit, count in self._before.items()}

    @classmethod
    def of(cls, trainer: Trainer) -> Foresight | None:
        units = _units_in_use(trainer)
        counted = [unit for unit in (Unit.SAMPLES, Unit.TOKENS) if unit in units]
        return cls(trainer, counted) if counted or units & {Unit.EPOCHS, Unit.RUN} else None

    def begin(self, window: Sequence[PendingBatch]) -> None:
        # Stores the predictions in `CurrentRun.ahead`, and whether the step ends its epoch in `closes_epoch`.
        current, last = self._current, window[-1]
        # The second condition holds if a limit such as `limit_train_batches` cuts the epoch short.
        current.closes_epoch = last.info.last or last.batch_idx + 1 >= current.training_batches
        for unit in self._units:
            count = self._progress.count(unit)
            # The best guess for tokens is the number in the step before.
            if count > self._before[unit]:
                current.ahead[unit] = count - self._before[unit]
            self._before[unit] = count
        rows = [micro_batch.info.global_rows for micro_batch in window]
        if Unit.SAMPLES in self._units and None not in rows:
            current.ahead[Unit.SAMPLES] = sum(each or 0 for each in rows)


class _Samples:
    note: None = None

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._progress = trainer.progress
        # Ranks that share a data shard read equal rows, so the sum over all ranks counts these several times.
        self._copies = trainer.world_size // trainer.strategy.topology.data_shard.count

    def count(self, window: Sequence[PendingBatch]) -> None:
        # Runs an all-reduce if this rank knows only its own number of rows.
        known = sum(micro_batch.info.global_rows or 0 for micro_batch in window)
        unknown = [micro_batch.info for micro_batch in window if micro_batch.info.global_rows is None]
        self._progress.samples += known + (self._exchanged(unknown) if unknown else 0)

    def _exchanged(self, infos: list[BatchInfo]) -> int:
        rows = [info.real_rows for info in infos]
        own = sum(each for each in rows if each is not None)
        total, missing = reduce(torch.tensor([own, None in rows]), "sum").tolist()
        if missing:
            raise DataError(
                "Samples cannot be counted, because the number of rows of a batch is unknown. The batch has a custom "
                "type, or combines loaders with different batch sizes. Use steps, epochs or time in settings instead."
            )
        return int(total) // self._copies


class _Tokens:
    # Uses the task's `num_tokens(batch)` if it is defined, else the weights of its losses.
    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._task, self._progress = task, trainer.progress
        self._topology, self._weights = trainer.strategy.topology, trainer.accelerator.optimizer_step.weights
        given = getattr(task, "num_tokens", None)  # some tasks use this name for the size of a vocabulary
        self._num_tokens: Callable[[Any], int | Tensor] | None = given if callable(given) else None
        self._weights.total = None

    def count(self, window: Sequence[PendingBatch]) -> None:
        if self._num_tokens is None:
            self._progress.tokens += self._weighed()
            return
        for each in window:
            if not each.is_released:
                self.note(each)
        own = sum(int(each.tokens) for each in window)  # type: ignore[misc, arg-type]
        # `Topology.sum` counts ranks with the same batches only once.
        total = torch.tensor(own, device=self._topology.device)
        self._progress.tokens += int(self._topology.sum(total))

    def note(self, micro_batch: PendingBatch) -> None:
        # Called before the batch is freed.
        if self._num_tokens is not None:
            info = micro_batch.info
            is_real = not info.is_padding
            micro_batch.tokens = self._num_tokens(_real_rows(micro_batch.batch, info)) if is_real else 0

    def _weighed(self) -> int:
        if self._weights.in_use is False:
            raise ConfigurationError(
                f"A setting of this run is in tokens, but {type(self._task).__name__} does not tell how many tokens a "
                "batch has. Define num_tokens(batch) on the task, or return {'loss': sum, 'weight': tokens} from "
                "training_step.",
            )
        total, self._weights.total = self._weights.total, None
        return 0 if total is None else round(float(total))


def _real_rows(batch: Any, info: BatchInfo) -> Any:
    rows, real = info.rows, info.real_rows
    if not info.padding or rows is None or real is None:
        return batch
    return recursively_apply(partial(_cut, rows=rows, real=real), batch)


def _cut(tensor: Tensor, rows: int, real: int) -> Tensor:
    return tensor[:real] if tensor.dim() and len(tensor) == rows else tensor
