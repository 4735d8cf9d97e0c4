"""Durations as people write them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from drivetrain.runtime.errors import ConfigurationError


def parse_duration(value: Any, name: str) -> timedelta | None:
    """Read a duration.

    Args:
        value: A `timedelta`, a dict of its arguments, `"DD:HH:MM:SS"`, or None.
        name: The argument's name, for errors.

    Raises:
        ConfigurationError: It is none of these.
    """
    if value is None or isinstance(value, timedelta):
        return value
    if isinstance(value, dict):
        try:
            return timedelta(**value)
        except TypeError:
            pass
    if isinstance(value, str):
        parts = value.strip().split(":")
        if len(parts) == 4 and all(part.isdigit() for part in parts):
            days, hours, minutes, seconds = map(int, parts)
            return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    raise ConfigurationError(
        f"{name}={value!r} is no duration. Give a timedelta, a dict such as {{'hours': 2}}, or 'DD:HH:MM:SS'."
    )
