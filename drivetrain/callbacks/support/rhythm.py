"""When something is due that happens every so many steps, or each time so much of a run is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.support.agreement import decide_on_main_process
from drivetrain.callbacks.support.step_timer import StepTimer
from drivetrain.runtime.durations import Duration, Unit

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class StepRhythm:
    """Is due every so many optimizer steps, or at each step that completes so much of the run in another unit.

    All processes count the same, so nothing is exchanged; a time is that of the main process's clock, which the others
    follow. A number of epochs is due at the last step of the epoch. To be made once the counters of a resumed run are
    there.

    Args:
        trainer: The trainer, within `fit`.
        every: A number of steps, or a duration.
        name: What it was given as, for errors.
        elapsed: Seconds of the first interval that have gone by before, in the run that is resumed.

    Attributes:
        steps: How many optimizer steps are between two of them; 0 where something else is counted.

    Raises:
        ConfigurationError: It is a part of a run whose length is not known.
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
        """Whether a step is due, however often it is asked; by all processes alike.

        Args:
            step: The number of optimizer steps once it is done: that of the last one, or of the one under way.
        """
        if not self._crosses:
            return step % self.steps == 0
        if step != self._asked:
            self._asked, self._is_due = step, self._decide(step)
        return self._is_due

    def was_due(self, step: int) -> bool:
        """Whether a step is known to be due, without asking other processes.

        Args:
            step: As for `is_due`.
        """
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
    """A moment in a run: once so much of it is done. To be made once the counters of a resumed run are there.

    Args:
        trainer: The trainer, within `fit`.
        after: How much.
        name: What it was given as, for errors.
        elapsed: Seconds of it that have gone by before, in the run that is resumed.
        by_epoch: Whether it is asked about once an epoch; else after each step.

    Raises:
        ConfigurationError: It is a part of a run whose length is not known.
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
