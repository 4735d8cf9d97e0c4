"""What trackers could not write: one warning for each cause, counted, and reported at the end."""

from __future__ import annotations

import re
import threading
from collections import Counter

from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.base import COMPLETED
from drivetrain.trackers.secrets import Secrets

logger = get_logger(__name__)


class Losses:
    """Counts the values that one tracker could not write, by cause.

    Args:
        owner: The tracker, for messages.

    Attributes:
        owner: The tracker, for messages.
        secrets: What no message may hold.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.secrets = Secrets()
        self._lock = threading.Lock()
        self._given = self._total = 0
        self._by_cause: Counter[str] = Counter()
        self._warned: set[str] = set()

    @property
    def total(self) -> int:
        """How many values were lost since the tracker was made."""
        return self._total

    def count_given(self, values: int) -> None:
        """Count values that the tracker was given."""
        with self._lock:
            self._given += values

    def count_lost(self, values: int, error: BaseException | str, advice: str = "") -> None:
        """Count values that were lost, and warn of a cause that is new.

        Args:
            values: How many.
            error: Why.
            advice: What follows from it, for the warning.
        """
        cause = self.secrets.in_text(error if isinstance(error, str) else first_line(error))
        kind = re.sub(r"0x[0-9a-f]+|\d+", "#", cause)
        with self._lock:
            self._total += values
            self._by_cause[kind] += values
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            logger.warning(f"{self.owner}: {cause}{advice or ' The run continues; what is lost is counted.'}")

    def report(self) -> None:
        """Report what was lost since the last report."""
        with self._lock:
            causes, given = [each for each in self._by_cause.most_common() if each[1]], self._given
            self._by_cause.clear()
            self._given = 0
        if causes:
            lost = sum(count for _, count in causes)
            listed = "; ".join(f"{count} by {cause.rstrip('.')}" for cause, count in causes)
            logger.warning(f"{self.owner} has lost {lost} of {max(lost, given)} values: {listed}.")


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """The status with which a run ends that an error may have ended, and the first line of that error."""
    if error is None:
        return COMPLETED, ""
    return ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed"), first_line(error)
