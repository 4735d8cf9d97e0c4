"""Durations of a run, counted in steps, epochs, samples, tokens, seconds or as a fraction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest


class Unit(str, Enum):
    """Unit of a `Duration`, such as steps, epochs or seconds.

    Attributes:
        STEPS: Optimizer steps.
        EPOCHS: Epochs.
        SAMPLES: Samples over all processes.
        TOKENS: Tokens over all processes.
        SECONDS: Seconds of wall-clock time.
        RUN: Fraction of the whole run.
    """

    STEPS = "steps"
    EPOCHS = "epochs"
    SAMPLES = "samples"
    TOKENS = "tokens"
    SECONDS = "seconds"
    RUN = "of the run"

    def __str__(self) -> str:
        return str(self.value)


# Spelling, including Composer's short forms -> the unit and its size in that unit.
_SPELLINGS: dict[str, tuple[Unit, float]] = {
    spelling: (unit, size)
    for unit, size, spellings in (
        (Unit.STEPS, 1, "steps step ba"),
        (Unit.EPOCHS, 1, "epochs epoch ep"),
        (Unit.SAMPLES, 1, "samples sample sp"),
        (Unit.TOKENS, 1, "tokens token tok"),
        (Unit.SECONDS, 1, "s sec secs second seconds"),
        (Unit.SECONDS, 60, "min m mins minute minutes"),
        (Unit.SECONDS, 3600, "h hr hrs hour hours"),
        (Unit.SECONDS, 86400, "d day days"),
        (Unit.RUN, 0.01, "%"),
        (Unit.RUN, 1, "dur"),
    )
    for spelling in spellings.split()
}
_LARGE = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_TEXT = re.compile(
    r"(?P<number>\d[\d_,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(?:(?P<large>[kKMBGT])\s+)?(?P<unit>[A-Za-z]+|%)?"
)
_UNITS = "steps, epochs, samples, tokens, s, min, h, d, and % of the run"
_ALLOWED = (
    "'500 steps', '2 epochs', '1M samples', '50M tokens', '10 min' or '10%'; a timedelta, a dict such as "
    "{'hours': 2}, or 'DD:HH:MM:SS'"
)


@dataclass(frozen=True)
class Duration:
    """Length of time within a run, such as `"500 steps"`, `"2 epochs"` or `"10 min"`.

    Args:
        amount: Number of units. It must be whole, except for seconds and fractions of the run.
        unit: Unit of the amount, a `Unit` or its text.

    Example:
        ```python
        from drivetrain import Duration

        assert Duration.of("1.5M samples") == Duration(1_500_000, "samples")
        assert Duration.of("2ep") == Duration(2, "epochs")
        ```
    """

    amount: int | float
    unit: Unit

    def __post_init__(self) -> None:
        # The dataclass is frozen, and the unit may be given as text.
        object.__setattr__(self, "unit", Unit(self.unit))

    def __str__(self) -> str:
        if self.unit is Unit.RUN:
            return f"{self.amount * 100:g}% {self.unit}"
        amount = f"{self.amount:,}" if isinstance(self.amount, int) else f"{self.amount:g}"
        return f"{amount} {self.unit.value.removesuffix('s') if self.amount == 1 else self.unit}"

    @classmethod
    def of(cls, value: Any, name: str = "duration") -> Duration | None:
        """Convert text such as `"2 epochs"`, a timedelta or a dict to a `Duration`. None stays None.

        Args:
            value: Text such as `"500 steps"`, `"2 epochs"`, `"1M samples"`, `"50M tokens"`, `"10 min"` or `"10%"`;
                Composer's short forms `"500ba"`, `"2ep"` and `"0.5dur"`; `"DD:HH:MM:SS"`; a timedelta or a dict of its
                arguments; a `Duration`; or None.
            name: Name of the argument, for error messages.

        Returns:
            The duration, or None if `value` is None.

        Raises:
            ConfigurationError: If the value is none of these. The message lists the units.
        """
        if value is None or isinstance(value, Duration):
            return value
        if isinstance(value, dict):
            try:
                value = timedelta(**value)
            except TypeError:
                pass
        if isinstance(value, timedelta):
            return cls(value.total_seconds(), Unit.SECONDS)
        if isinstance(value, str):
            return cls._of_text(value.strip(), name)
        raise ConfigurationError(f"{name}={value!r} is not a duration. Use {_ALLOWED}.")

    @classmethod
    def _of_text(cls, text: str, name: str) -> Duration:
        parts = text.split(":")
        if len(parts) == 4 and all(part.isdigit() for part in parts):
            days, hours, minutes, seconds = map(int, parts)
            seconds += 60 * (minutes + 60 * (hours + 24 * days))
            return cls(float(seconds), Unit.SECONDS)
        if ":" in text:
            raise ConfigurationError(
                f"{name} is {text!r}, but a time with colons must have the format DD:HH:MM:SS, such as '00:06:00:00'.",
            )
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ConfigurationError(f"{name}={text!r} is not a duration. Use {_ALLOWED}.")
        written = found["unit"] or ""
        spelling = written if len(written) == 1 else written.lower()  # a single M is a million, not a minute
        if spelling not in _SPELLINGS:
            wrong = f"{written!r} is not a unit" if written else "the unit is missing"
            raise ConfigurationError(
                f"{name}={text!r}: {wrong}. The units are {_UNITS}.{nearest(spelling, _SPELLINGS)}"
            )
        unit, size = _SPELLINGS[spelling]
        amount = float(re.sub("[_,]", "", found["number"])) * _LARGE.get((found["large"] or "").upper(), 1) * size
        return cls(cls._checked(amount, unit, f"{name}={text!r}"), unit)

    @staticmethod
    def _checked(amount: float, unit: Unit, given: str) -> int | float:
        if unit is Unit.SECONDS:
            return amount
        if unit is Unit.RUN:
            if not 0 < amount <= 1:
                raise ConfigurationError(f"{given} is not a valid part of a run. Use above 0 % and at most 100 %.")
            return amount
        whole = round(amount)  # 2.01 * 1e6 is 2009999.9999999998
        if round(amount, 6) != whole:
            raise ConfigurationError(f"{given} is not a whole number of {unit}. Use a whole number.")
        return whole

    @property
    def timedelta(self) -> timedelta:
        """The duration as a `datetime.timedelta`, which is available only if the unit is seconds."""
        assert self.unit is Unit.SECONDS
        return timedelta(seconds=self.amount)

    def part_of(self, whole: Duration) -> Duration:
        """Return this fraction of the duration `whole`, for example 5 epochs for 10 % of 50 epochs.

        Args:
            whole: Length of the run.
        """
        amount = self.amount * whole.amount
        return Duration(amount if whole.unit is Unit.SECONDS else max(1, round(amount)), whole.unit)


def clock_time(value: Any, name: str, otherwise: str = "") -> timedelta | None:
    # `otherwise` is the end of the error message.
    duration = Duration.of(value, name)
    if duration is None:
        return None
    if duration.unit is not Unit.SECONDS:
        raise ConfigurationError(
            f"{name}={value!r} is not a time. Use '10 min', a timedelta, a dict such as {{'hours': 2}}, or "
            f"'DD:HH:MM:SS'.{otherwise}",
        )
    return duration.timedelta


def interval_of(value: Any, name: str) -> int | Duration:
    """Parse an interval such as `"500 steps"` to an int or a `Duration`."""
    if isinstance(value, int):
        return value
    duration = Duration.of(value, name)
    if duration is None or not duration.amount:
        raise ConfigurationError(
            f"{name}={value!r} is not an interval. Use a number of steps, at least 1, or a duration such as "
            "'500 steps', '1M samples', '10 min' or '10%'.",
        )
    return int(duration.amount) if duration.unit is Unit.STEPS else duration


def count_of(value: Any, name: str, unit: Unit, otherwise: str = "") -> Any:
    # Other values, such as None or a wrong type, are checked by the caller.
    if not isinstance(value, Duration) and not (isinstance(value, str) and value.strip()[:1].isdigit()):
        return value
    duration = Duration.of(value, name)
    assert duration is not None
    if duration.unit is not unit:
        raise ConfigurationError(
            f"{name}={value!r} is not a number of {unit}. Use one such as 2 or '2 {unit}'.{otherwise}"
        )
    return int(duration.amount)
