"""When something is due that happens every so many steps, or each time so much of a run is done."""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.durations import Duration, Unit, interval_of
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError, nearest
from drivetrain.runtime.state import PartialState

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


# Decisions that all processes must take alike: taken on the main process, sent to the others


T = TypeVar("T")


def decide_on_main_process(decide: Callable[[], T]) -> T:
    """Call a function on the main process and return its result on every process.

    What it raises is raised on every process, so that no process waits for one that is gone.
    """
    state = PartialState()
    if not state.use_distributed:
        return decide()
    message: list[Any] = [None, None, None]
    raised: Exception | None = None
    if state.is_main_process:
        try:
            message[0] = decide()
        except Exception as error:
            raised = error
            message[1] = type(error) if isinstance(error, DrivetrainError) else DrivetrainError
            message[2] = error.message if isinstance(error, DrivetrainError) else f"On the main process: {error!r}"
    broadcast_object_list(message)
    if raised is not None:
        raise raised
    if message[1] is not None:
        raise message[1](message[2])
    result: T = message[0]
    return result


# A clock of the main process that all processes follow


class StepTimer:
    """Is due every so many seconds of the main process's clock, on all processes at the same step.

    The processes ask each other only about halfway to the next time, again halfway of what is left, and so
    on: a few times in all, not at every step.
    """

    def __init__(self, seconds: float, step: int, elapsed: float = 0.0) -> None:
        self._seconds = seconds
        self._asked = time.monotonic()
        self._since = self._asked - elapsed
        self._asked_step = step
        self._ask_at = step + 1

    @property
    def elapsed(self) -> float:
        """Seconds since the last call that was due, by this process's clock."""
        return time.monotonic() - self._since

    def is_due(self, step: int) -> bool:
        """Whether the time has gone by; called by all processes with the same step."""
        if step < self._ask_at:
            return False
        due, self._ask_at = decide_on_main_process(lambda: self._poll(step))
        return due

    def _poll(self, step: int) -> tuple[bool, int]:
        now = time.monotonic()
        pace = (now - self._asked) / max(1, step - self._asked_step)
        self._asked, self._asked_step = now, step
        due = now - self._since >= self._seconds
        if due:
            self._since = now
        left = self._since + self._seconds - now
        return due, step + max(1, int(left / 2 / max(pace, 1e-6)))


class StepInterval:
    """Is due every so many optimizer steps, or at each step that completes so much of the run in another unit.

    All processes count the same, so nothing is exchanged; a time is that of the main process's clock, which the others
    follow. A number of epochs is due at the last step of the epoch. To be made once the counters of a resumed run are
    there.

    Attributes:
        steps: How many optimizer steps are between two of them; 0 where something else is counted.
    """

    def __init__(self, trainer: Trainer, every: int | Duration, name: str, elapsed: float = 0.0) -> None:
        self._progress, self._current = trainer.progress, trainer.current
        self._every = trainer.resolve_duration(every, name) if isinstance(every, Duration) else None
        self.steps = every if isinstance(every, int) else 0
        if self._every is not None and self._every.unit is Unit.STEPS:
            self.steps = int(self._every.amount)
        self._crosses = isinstance(every, Duration) or not self.steps
        self._timer: StepTimer | None = None
        if self._every is not None and self._every.unit is Unit.SECONDS:
            self._timer = StepTimer(float(self._every.amount), trainer.global_step, elapsed)
        self._asked, self._is_due = -1, False
        self._done = self._periods(trainer.global_step)

    @property
    def elapsed(self) -> float:
        """Seconds of the interval under way, for a run that resumes this one; 0 where no time is counted."""
        return 0.0 if self._timer is None else self._timer.elapsed

    def is_due(self, step: int) -> bool:
        """Whether a step is due, however often it is asked; by all processes alike."""
        if not self._crosses:
            return step % self.steps == 0
        if step != self._asked:
            self._asked, self._is_due = step, self._decide(step)
        return self._is_due

    def was_due(self, step: int) -> bool:
        """Whether a step is known to be due, without asking other processes."""
        if self._timer is None:
            return self.is_due(step)
        return self._asked == step and self._is_due

    def _decide(self, step: int) -> bool:
        if self._timer is not None:
            return self._timer.is_due(step)
        if self._every is not None and self._every.unit is Unit.EPOCHS:
            return self._current.closes_epoch and (self._progress.epoch + 1) % self._every.amount == 0
        before, self._done = self._done, self._periods(step)
        return self._done > before

    def _periods(self, step: int) -> int:
        """How many intervals are complete once a step is done."""
        every = self._every
        if every is None or every.unit in (Unit.SECONDS, Unit.EPOCHS):
            return 0
        if every.unit is Unit.STEPS:
            return step // self.steps
        count = self._progress.count(every.unit)
        if step > self._progress.global_step:
            count += self._current.ahead.get(every.unit, 0)
        return int(count // every.amount)


class RunPoint:
    """A moment in a run: once so much of it is done. To be made once the counters of a resumed run are there."""

    def __init__(
        self, trainer: Trainer, after: Duration, name: str, elapsed: float = 0.0, by_epoch: bool = False
    ) -> None:
        self._progress, self._by_epoch = trainer.progress, by_epoch
        self._after = trainer.resolve_duration(after, name)
        self._has_come = False
        self._timer: StepTimer | None = None
        if self._after.unit is Unit.SECONDS:
            self._has_come = elapsed >= self._after.amount
            self._timer = StepTimer(float(self._after.amount), trainer.global_step, elapsed)

    @property
    def elapsed(self) -> float:
        """Seconds of it that have gone by, for a run that resumes this one; 0 where no time is counted."""
        if self._timer is None:
            return 0.0
        return float(self._after.amount) if self._has_come else self._timer.elapsed

    def has_come(self) -> bool:
        """Whether it is that far; asked by all processes at the same steps."""
        if self._timer is None:
            return self._progress.count(self._after.unit) >= self._after.amount
        if not self._has_come and self._by_epoch:
            elapsed = self._timer.elapsed
            self._has_come = decide_on_main_process(lambda: elapsed >= self._after.amount)
        elif not self._has_come:
            self._has_come = self._timer.is_due(self._progress.global_step)
        return self._has_come


# When values about steps are logged: in the rows that the Trainer logs


class StepLog:
    """Decides at which optimizer steps a callback logs: every `log_every_n_steps`, or as often as it was given itself.

    Attributes:
        every: How often values are logged, as it was given.
    """

    def __init__(self, owner: str, trainer: Trainer, every: int | Duration | None = None) -> None:
        if not (trainer.loggers or trainer.barebones):
            raise ConfigurationError(
                f"Cannot use `{owner}` callback. It has nowhere to log to: the Trainer has no logger. Give it one, "
                "such as Trainer(logger='csv'), or take this callback out.",
            )
        self._trainer = trainer
        self.every = trainer.log_every_n_steps if every is None else every
        self._steps = self.every if isinstance(self.every, int) else -1
        self._owner, self._is_own = owner, every is not None
        self._rhythm: StepInterval | None = None
        self._last = trainer.global_step

    def begin(self) -> StepLog:
        """Count from here on what is not counted in steps; called when training starts. Returns this."""
        trainer = self._trainer
        if not self._is_own:
            self._rhythm = trainer.tracker_log.rhythm
        elif not isinstance(self.every, int):
            self._rhythm = StepInterval(trainer, self.every, f"{self._owner}.every")
        return self

    def is_due(self, step: int) -> bool:
        """Whether a step is logged that was not; asked once for each."""
        if not self._steps or step == self._last:
            return False
        if step % self._steps if self._steps > 0 else not (self._rhythm and self._rhythm.is_due(step)):
            return False
        self._last = step
        return True

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Give values to the trackers."""
        if values:
            self._trainer.log_metrics(values, step)


def checked_every(every: Any, owner: str) -> int | Duration | None:
    """What a callback was given as `every`, read and checked."""
    if every is None:
        return None
    interval = interval_of(every, f"{owner}.every")
    if isinstance(interval, bool) or (isinstance(interval, int) and interval < 1):
        raise ConfigurationError(f"{owner}(every={every!r}): give a whole number of steps from 1 on.")
    return interval


# Reading and comparing the metric that a callback watches


MODES = ("min", "max")


def check_mode(mode: str, owner: str) -> None:
    """Refuse a mode that is neither `"min"` nor `"max"`."""
    if mode not in MODES:
        raise ConfigurationError(
            f"{owner}: `mode` can be 'min' where a lower value is better, such as a loss, or 'max' where a higher one "
            f"is, but got {mode}.{nearest(str(mode), MODES)}",
        )


def is_better(value: float, than: float, mode: str) -> bool:
    """Whether a value beats another one; NaN beats nothing, and any other value beats NaN."""
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value < than if mode == "min" else value > than


def monitored_value(metrics: Mapping[str, Any], monitor: str) -> float | None:
    """Return the value of a metric as a number, or None if it was not logged."""
    value = metrics.get(monitor)
    return None if value is None else float(value)


def find_typo(logged: Collection[str], monitor: str, owner: str) -> str | None:
    """What is wrong with the name of a metric where a sanity check has logged one that is spelled nearly like it.

    A metric that only training logs, or only a later validation, is no typo, so a name that is merely missing passes.
    """
    if monitor in logged or "train" in monitor:
        return None
    alike = difflib.get_close_matches(monitor, sorted(logged), n=1, cutoff=_TYPO)
    if not alike or _without_numbers(alike[0]) == _without_numbers(monitor):
        return None
    return (
        f"{owner}(monitor={monitor!r}): the sanity check has logged {', '.join(map(repr, sorted(logged)))}. Did you "
        f"mean {alike[0]!r}? If {monitor!r} is logged later, leave the sanity check out: "
        "Trainer(num_sanity_val_steps=0)."
    )


_TYPO = 0.85  # 'val_los' for 'val_loss' has 0.93, 'train_loss' 0.67


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)


def missing_metric_message(metrics: Mapping[str, Any], monitor: str, owner: str) -> str:
    """The message that a metric is not there: which ones are, and what to do."""
    if metrics:
        there = f"Logged so far: {', '.join(map(repr, sorted(metrics)))}.{nearest(monitor, metrics)}"
    else:
        there = "Nothing was logged so far."
    return (
        f"{owner}(monitor={monitor!r}): no metric of this name was logged. {there} "
        f"Log it with self.log({monitor!r}, value) in a step of the task, or monitor another one."
    )
