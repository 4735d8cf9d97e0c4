"""Intervals at which callbacks act, and helpers that read and compare the metric they monitor."""

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


# Decisions of the main process


T = TypeVar("T")


def decide_on_main_process(decide: Callable[[], T]) -> T:
    """Call a function on the main process, and return its result on all processes.

    If it raises, the exception is raised on every process, so that no process waits for one that has left.
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
            # Only these errors can be created again from their message on other processes.
            message[1] = type(error) if isinstance(error, DrivetrainError) else DrivetrainError
            message[2] = error.message if isinstance(error, DrivetrainError) else f"On the main process: {error!r}"
    broadcast_object_list(message)
    if raised is not None:
        raise raised
    if message[1] is not None:
        raise message[1](message[2])
    result: T = message[0]
    return result


# Intervals


class StepTimer:
    """Timer that is due every `seconds`, at the same optimizer step on all processes.

    The clock of the main process decides. The processes do not communicate at each step: they do so about halfway to
    the due time, then halfway through the remaining time, and so on.
    """

    def __init__(self, seconds: float, step: int, elapsed: float = 0.0) -> None:
        self._seconds = seconds
        self._asked = time.monotonic()
        self._since = self._asked - elapsed
        self._asked_step = step
        self._ask_at = step + 1

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._since

    def is_due(self, step: int) -> bool:
        if step < self._ask_at:
            return False
        # All processes reach this line at the same step, and get the same answer.
        due, self._ask_at = decide_on_main_process(lambda: self._poll(step))
        return due

    def _poll(self, step: int) -> tuple[bool, int]:
        now = time.monotonic()
        pace = (now - self._asked) / max(1, step - self._asked_step)
        self._asked, self._asked_step = now, step
        due = now - self._since >= self._seconds
        if due:
            self._since = now
        # Ask again halfway to the due time: few messages at first, and accurate at the end.
        left = self._since + self._seconds - now
        return due, step + max(1, int(left / 2 / max(pace, 1e-6)))


class StepInterval:
    """Interval at which a callback acts, such as `"100 steps"` or `"10 min"`.

    Except for a time, all processes count alike and do not communicate. For a time, the clock of the main process
    decides. An interval in epochs is due at the last step of an epoch. Create it after the counters of a resumed run
    have been restored.
    """

    def __init__(self, trainer: Trainer, every: int | Duration, name: str, elapsed: float = 0.0) -> None:
        self._progress, self._current = trainer.progress, trainer.current
        self._every = trainer.resolve_duration(every, name) if isinstance(every, Duration) else None
        self.steps = every if isinstance(every, int) else 0
        if self._every is not None and self._every.unit is Unit.STEPS:
            self.steps = int(self._every.amount)
        # A plain number of steps needs no counters: its multiples are due.
        self._crosses = isinstance(every, Duration) or not self.steps
        self._timer: StepTimer | None = None
        if self._every is not None and self._every.unit is Unit.SECONDS:
            self._timer = StepTimer(float(self._every.amount), trainer.global_step, elapsed)
        self._asked, self._is_due = -1, False
        self._done = self._periods(trainer.global_step)

    @property
    def elapsed(self) -> float:
        return 0.0 if self._timer is None else self._timer.elapsed

    def is_due(self, step: int) -> bool:
        """Return True if the callback's interval ends at this optimizer step.

        Every process must call this method. Repeated calls for one step give the same result.
        """
        if not self._crosses:
            return step % self.steps == 0
        if step != self._asked:
            self._asked, self._is_due = step, self._decide(step)
        return self._is_due

    def was_due(self, step: int) -> bool:
        if self._timer is None:
            return self.is_due(step)
        # without communication, unlike `is_due`
        return self._asked == step and self._is_due

    def _decide(self, step: int) -> bool:
        if self._timer is not None:
            return self._timer.is_due(step)
        if self._every is not None and self._every.unit is Unit.EPOCHS:
            return self._current.closes_epoch and (self._progress.epoch + 1) % self._every.amount == 0
        before, self._done = self._done, self._periods(step)
        return self._done > before

    def _periods(self, step: int) -> int:
        every = self._every
        if every is None or every.unit in (Unit.SECONDS, Unit.EPOCHS):
            return 0
        if every.unit is Unit.STEPS:
            return step // self.steps
        count = self._progress.count(every.unit)
        if step > self._progress.global_step:
            # The counters do not include the current step yet, so its samples and tokens are estimated.
            count += self._current.ahead.get(every.unit, 0)
        return int(count // every.amount)


class RunPoint:
    """Checks whether a run has reached a given point, such as `"10%"` of its length or `"1M samples"`.

    Create it after the counters of a resumed run have been restored.
    """

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
        if self._timer is None:
            return 0.0
        return float(self._after.amount) if self._has_come else self._timer.elapsed

    def has_come(self) -> bool:
        # All processes must call this at the same steps.
        if self._timer is None:
            return self._progress.count(self._after.unit) >= self._after.amount
        if not self._has_come and self._by_epoch:
            elapsed = self._timer.elapsed
            # At the start of an epoch the exact time counts, and one message per epoch is cheap.
            self._has_come = decide_on_main_process(lambda: elapsed >= self._after.amount)
        elif not self._has_come:
            self._has_come = self._timer.is_due(self._progress.global_step)
        return self._has_come


# Logging interval


class StepLog:
    """Decides at which optimizer steps a callback, such as `MemoryMonitor`, logs its values."""

    def __init__(self, owner: str, trainer: Trainer, every: int | Duration | None = None) -> None:
        if not (trainer.loggers or trainer.barebones):
            raise ConfigurationError(
                f"Cannot use `{owner}` callback. The Trainer has no logger. Set one, such as "
                "Trainer(logger='csv'), or remove this callback.",
            )
        self._trainer = trainer
        self.every = trainer.log_every_n_steps if every is None else every
        self._steps = self.every if isinstance(self.every, int) else -1
        self._owner, self._is_own = owner, every is not None
        self._interval: StepInterval | None = None
        self._last = trainer.global_step

    def begin(self) -> StepLog:
        trainer = self._trainer
        if not self._is_own:
            self._interval = trainer.tracker_log.step_interval
        elif not isinstance(self.every, int):
            self._interval = StepInterval(trainer, self.every, f"{self._owner}.every")
        return self

    def is_due(self, step: int) -> bool:
        # A second call for the same step returns False.
        if not self._steps or step == self._last:
            return False
        if step % self._steps if self._steps > 0 else not (self._interval and self._interval.is_due(step)):
            return False
        self._last = step
        return True

    def write(self, values: Mapping[str, float], step: int) -> None:
        if values:
            self._trainer.log_metrics(values, step)


def checked_every(every: Any, owner: str) -> int | Duration | None:
    if every is None:
        return None
    interval = interval_of(every, f"{owner}.every")
    if isinstance(interval, bool) or (isinstance(interval, int) and interval < 1):
        raise ConfigurationError(f"{owner}(every={every!r}): every must be at least 1 step.")
    return interval


# Monitored metrics


MODES = ("min", "max")


def check_mode(mode: str, owner: str) -> None:
    if mode not in MODES:
        raise ConfigurationError(
            f"{owner}: `mode` can be 'min' if lower values are better, as for a loss, or 'max' if higher values "
            f"are better, but got {mode}.{nearest(str(mode), MODES)}",
        )


def is_better(value: float, than: float, mode: str) -> bool:
    """Return True if `value` is a better metric value than `than`. NaN is worse than any other value."""
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value < than if mode == "min" else value > than


def monitored_value(metrics: Mapping[str, Any], monitor: str) -> float | None:
    value = metrics.get(monitor)
    return None if value is None else float(value)


def find_typo(logged: Collection[str], monitor: str, owner: str) -> str | None:
    # The sanity check logs no training metrics, so they cannot be checked.
    if monitor in logged or "train" in monitor:
        return None
    # A metric that only a later validation logs is no typo, so a name without a similar one passes.
    alike = difflib.get_close_matches(monitor, sorted(logged), n=1, cutoff=_TYPO)
    # `val_loss_1` and `val_loss_2` are two metrics, not a typo.
    if not alike or _without_numbers(alike[0]) == _without_numbers(monitor):
        return None
    return (
        f"{owner}(monitor={monitor!r}): the sanity check has logged {', '.join(map(repr, sorted(logged)))}. Did you "
        f"mean {alike[0]!r}? If {monitor!r} is logged later, turn the sanity check off: "
        "Trainer(num_sanity_val_steps=0)."
    )


_TYPO = 0.85  # 'val_los' for 'val_loss' has 0.93, 'train_loss' 0.67


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)


def missing_metric_message(metrics: Mapping[str, Any], monitor: str, owner: str) -> str:
    if metrics:
        there = f"Logged so far: {', '.join(map(repr, sorted(metrics)))}.{nearest(monitor, metrics)}"
    else:
        there = "Nothing was logged so far."
    return (
        f"{owner}(monitor={monitor!r}): no metric of this name was logged. {there} "
        f"Log it with self.log({monitor!r}, value) in a step of the task, or monitor another metric."
    )
