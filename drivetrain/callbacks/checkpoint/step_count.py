"""A count of steps, samples or tokens that is due every so many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.runtime.durations import Duration

if TYPE_CHECKING:
    from drivetrain.trainer.state.progress import Progress


class StepCount:
    """Is due after each step in which the count comes to, or beyond, the next multiple of an interval.

    All processes count the same, so nothing is exchanged.

    Args:
        progress: The counters of the run.
        every: The interval: a number of steps, samples or tokens.

    Attributes:
        elapsed: Nothing of it is needed where a run is resumed: the counters are those of the run.
    """

    elapsed = 0.0

    def __init__(self, progress: Progress, every: Duration) -> None:
        self._progress, self._every = progress, every
        self._last = self._periods()

    def is_due(self, step: int) -> bool:
        """Whether the next multiple is reached; called by all processes with the same step."""
        before, self._last = self._last, self._periods()
        return self._last > before

    def _periods(self) -> int:
        return int(self._progress.count(self._every.unit) // self._every.amount)
