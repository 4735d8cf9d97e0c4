"""A clock of the main process that all processes follow."""

from __future__ import annotations

import time

from drivetrain.callbacks.support.agreement import decide_on_main_process


class StepTimer:
    """Is due every so many seconds of the main process's clock, on all processes at the same step.

    The processes ask each other only about halfway to the next time, again halfway of what is left, and so
    on: a few times in all, not at every step.

    Args:
        seconds: The time between two of its calls.
        step: The number of optimizer steps so far.
        elapsed: Seconds of the first interval that have gone by before, in the run that is resumed.
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
