"""Numbers, times and sizes as the pages show them."""

from __future__ import annotations

import math
import time
from typing import Any


def number(value: Any) -> str:
    """Format a number with as many digits as a reader takes in; anything else as text."""
    if not isinstance(value, int | float | None):
        return str(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.5g}"


def duration(seconds: float) -> str:
    """A time in the units that it is long in."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def moment(seconds: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def plain_text(value: Any) -> str:
    """A value of a configuration."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_text, value)) or "none"
    return str(value)
