"""When values about steps are logged: in the rows that the Trainer logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.support.rhythm import StepRhythm
from drivetrain.runtime.durations import Duration, interval_of
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class StepLog:
    """Decides at which optimizer steps a callback logs: every `log_every_n_steps`, or as often as it was given itself.

    Args:
        owner: The callback's name, for errors.
        trainer: The trainer.
        every: A number of steps or a duration, as `checked_every` returns it; None for `log_every_n_steps`.

    Attributes:
        every: How often values are logged, as it was given.

    Raises:
        ConfigurationError: The Trainer has no logger.
    """

    def __init__(self, owner: str, trainer: Trainer, every: int | Duration | None = None) -> None:
        if not (trainer.loggers or trainer.barebones):
            raise ConfigurationError(
                f"Cannot use `{owner}` callback. It has nowhere to log to: the Trainer has no logger. Give it one, "
                "such as Trainer(logger='csv'), or take this callback out.",
                code="DT-094",
            )
        self._trainer = trainer
        self.every = trainer.log_every_n_steps if every is None else every
        self._steps = self.every if isinstance(self.every, int) else -1
        self._owner, self._is_own = owner, every is not None
        self._rhythm: StepRhythm | None = None
        self._last = trainer.global_step

    def begin(self) -> StepLog:
        """Count from here on what is not counted in steps; called when training starts. Returns this."""
        trainer = self._trainer
        if not self._is_own:
            self._rhythm = trainer.tracker_log.rhythm
        elif not isinstance(self.every, int):
            self._rhythm = StepRhythm(trainer, self.every, f"{self._owner}.every")
        return self

    def is_due(self, step: int) -> bool:
        """Whether a step is logged that was not; asked once for each.

        Args:
            step: The number of optimizer steps once it is done.
        """
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
    """What a callback was given as `every`, read and checked.

    Args:
        every: A number of steps, a duration, or None.
        owner: The callback's name, for errors.

    Raises:
        ConfigurationError: It is none of these.
    """
    if every is None:
        return None
    interval = interval_of(every, f"{owner}.every")
    if isinstance(interval, bool) or (isinstance(interval, int) and interval < 1):
        raise ConfigurationError(f"{owner}(every={every!r}): give a whole number of steps from 1 on.", code="DT-002")
    return interval
