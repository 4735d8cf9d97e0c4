"""How far a run has come."""

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
    """How far an epoch has come; an epoch goes through all of them in this order.

    Attributes:
        BATCHES: Batches are left to train on.
        SCHEDULED: The last batch is trained on, and the schedulers that follow epochs have stepped.
        DRAINED: The loader is at its end; what is left are a validation and the hooks of the epoch's end.
        CLOSING: Nothing is left but the hooks that run last, such as that of `ModelCheckpoint`.
    """

    BATCHES = 0
    SCHEDULED = 1
    DRAINED = 2
    CLOSING = 3


@dataclass
class Progress:
    """The counters of a run; all of them are part of its state.

    Attributes:
        global_step: Optimizer steps taken.
        epoch: Epochs finished.
        batches_in_epoch: Batches of this process consumed in the epoch under way.
        total_batches: Batches of this process consumed in all.
        validations: Validation runs finished.
        validated_at: `total_batches` at the last of them.
        due_at: `total_batches` at the last one that was due by a clock, which cannot be derived when resuming.
        parts: In how many parts each batch is computed, since memory lacks for it as a whole.
        validated_count: What `val_check_interval` counts, at the last validation that it led to.
        samples: Samples trained on, over all processes; counted where anything of the run is measured in samples.
        tokens: The same of tokens.
        phase: How far the epoch under way has come.
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
        """Whether the epoch has no batch left."""
        return self.phase >= Phase.DRAINED

    def count(self, unit: Unit) -> int:
        """How many steps, epochs, samples or tokens the run has come."""
        value: int = getattr(self, _COUNTED[unit])
        return value

    def forget(self, unit: Unit) -> None:
        """Count a unit from 0 again."""
        setattr(self, _COUNTED[unit], 0)

    def begin_epoch(self, epoch: int) -> None:
        """Stand before an epoch's first batch."""
        self.epoch = epoch
        self.batches_in_epoch = 0
        self.phase = Phase.BATCHES

    def state_dict(self) -> dict[str, Any]:
        """The counters."""
        return {name: getattr(self, name) for name in _COUNTERS} | {"phase": self.phase.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the counters back."""
        start = Progress()
        for name in _COUNTERS:
            setattr(self, name, int(state.get(name, getattr(start, name))))
        self.phase = Phase[state["phase"]] if "phase" in state else _phase_of_booleans(state)


_COUNTED = {Unit.STEPS: "global_step", Unit.EPOCHS: "epoch", Unit.SAMPLES: "samples", Unit.TOKENS: "tokens"}
_COUNTERS = tuple(each.name for each in fields(Progress) if each.name != "phase")


def _phase_of_booleans(state: Mapping[str, Any]) -> Phase:
    """The phase that a checkpoint of an earlier version has spelled in three booleans."""
    if state.get("epoch_is_ending"):
        return Phase.CLOSING
    if state.get("batches_are_done"):
        return Phase.DRAINED
    return Phase.SCHEDULED if state.get("epoch_over") else Phase.BATCHES


# What a run is at: its stage, its batch, and how many batches there are


@dataclass(slots=True, eq=False)
class CurrentRun:
    """What a run is at. The loops write it; everything else reads it, through the Trainer's properties.

    Attributes:
        stage: What runs now; None between two runs.
        sanity_checking: Whether this is the validation before training, whose results are dropped.
        batch: The batch under way.
        batch_info: What its loader recorded about it.
        training_batches: Batches of this process in an epoch; infinite where this is not known.
        evaluation_batches: For each stage, the batches of this process in each of its loaders.
        loaders: For each stage, the user's loader or loaders.
        last_epoch: Batches of this process that the last training epoch has begun and finished; both 0 before it.
        ahead: Samples and tokens of the step under way, where anything is measured in them: as far as they are known,
            else those of the step before.
        closes_epoch: Whether the step under way, or the last one, is the last of its epoch; known where anything is
            measured in epochs.
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
        """How many batches there are, and were in the last epoch, for another process to adopt."""
        return self.training_batches, self.evaluation_batches, self.last_epoch

    def adopt_lengths(self, lengths: tuple[float, dict[Stage, list[float]], tuple[int, int]]) -> None:
        """Take over how many batches there are where a verb has run in other processes."""
        self.training_batches, self.evaluation_batches, self.last_epoch = lengths

    def leave_batch(self) -> None:
        """Record that no batch is under way."""
        self.batch = self.batch_info = None

    def leave_epoch(self, finished: int) -> None:
        """Record that no batch of training is under way, and how many there were."""
        self.last_epoch = finished if self.batch_info is None else self.batch_info.index + 1, finished
        self.leave_batch()

    def leave_stage(self) -> None:
        """Record that nothing runs."""
        self.leave_batch()
        self.stage, self.sanity_checking = None, False

    @contextmanager
    def within(self, stage: Stage, sanity_checking: bool = False) -> Iterator[None]:
        """Be in another stage in the body; then in the one before, at the same batch."""
        before = self.stage, self.sanity_checking, self.batch, self.batch_info
        self.stage, self.sanity_checking = stage, sanity_checking
        yield
        self.stage, self.sanity_checking, self.batch, self.batch_info = before

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Be at the same place in the end as now; what the user's loaders are stays known."""
        before = {name: getattr(self, name) for name in self.__slots__ if name != "loaders"}
        before["evaluation_batches"] = dict(self.evaluation_batches)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def find_batch_size(self) -> int:
        """Real rows of the current batch, from its loader, or else from its tensors."""
        info = self.batch_info
        if info is not None and info.rows is not None:
            return info.rows - info.padding
        return find_batch_size(self.batch)


# How many samples and tokens a run has trained on, over all processes; and what parts of a run come to


FOREVER = float("inf")


def duration_in_run(trainer: Trainer, duration: Duration, name: str) -> Duration:
    """A duration in steps, samples, tokens or seconds, where it is a part of the run."""
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
    )


def validation_interval(trainer: Trainer) -> int | float | timedelta | Duration | None:
    """How often a run is validated; a part of the run in steps, samples, tokens or a time."""
    interval = trainer.val_check_interval
    if not isinstance(interval, Duration):
        return interval
    settled = duration_in_run(trainer, interval, "val_check_interval")
    return settled.timedelta if settled.unit is Unit.SECONDS else settled


def counters(trainer: Trainer, task: Task) -> list[_Samples | _Tokens]:
    """What counts the samples and tokens of each window, where anything of the run is measured in them."""
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
            )
        else:
            found.append(kind(trainer, task))
    return found


def _units_in_use(trainer: Trainer) -> set[Unit]:
    """What anything of the run is measured in, beside numbers of steps."""
    given: list[Any] = [trainer.max_duration, trainer.val_check_interval, trainer.log_every_n_steps]
    given += [config.frequency for config in trainer.lr_scheduler_configs]
    for callback in trainer.callbacks:
        schedule: Any = callback.schedule
        if type(callback).rhythm is not Callback.rhythm:  # a class that sets it by its old name
            message = f"{type(callback).__name__}.rhythm is deprecated since drivetrain 0.1.0. Use schedule."
            warnings.warn(message, DrivetrainDeprecationWarning, stacklevel=2)
            schedule = callback.rhythm
        given += schedule if isinstance(schedule, tuple) else [schedule]
    return {each.unit for each in given if isinstance(each, Duration)}


class Foresight:
    """What is known of a step before it is taken, where anything is measured in epochs, samples or tokens."""

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
        """Record what is known of a step."""
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
    """Counts the tokens of each window: what `num_tokens` of the task returns, else what the losses weigh."""

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
