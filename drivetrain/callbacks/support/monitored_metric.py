"""Reading and comparing the metric that a callback watches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest

MODES = ("min", "max")


def check_mode(mode: str, owner: str) -> None:
    """Refuse a mode that is neither ``"min"`` nor ``"max"``."""
    if mode not in MODES:
        raise ConfigurationError(
            f"{owner}(mode={mode!r}): mode is 'min' where a lower value is better, such as a loss, "
            f"or 'max' where a higher one is.{nearest(str(mode), MODES)}"
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


def missing_metric_message(metrics: Mapping[str, Any], monitor: str, owner: str) -> str:
    """Say that a metric is not there, which ones are, and what to do."""
    if metrics:
        there = f"Logged so far: {', '.join(map(repr, sorted(metrics)))}.{nearest(monitor, metrics)}"
    else:
        there = "Nothing was logged so far."
    return (
        f"{owner}(monitor={monitor!r}): no metric of this name was logged. {there} "
        f"Log it with self.log({monitor!r}, value) in a step of the task, or monitor another one."
    )
