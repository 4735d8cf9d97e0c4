"""Reading and comparing the metric that a callback watches."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest

MODES = ("min", "max")


def check_mode(mode: str, owner: str) -> None:
    """Refuse a mode that is neither `"min"` nor `"max"`."""
    if mode not in MODES:
        raise ConfigurationError(
            f"{owner}: `mode` can be 'min' where a lower value is better, such as a loss, or 'max' where a higher one "
            f"is, but got {mode}.{nearest(str(mode), MODES)}",
            code="DT-001",
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


def find_typo(logged: Collection[str], monitor: str, owner: str) -> str | None:
    """What is wrong with the name of a metric where a sanity check has logged one that is spelled nearly like it.

    A metric that only training logs, or only a later validation, is no typo, so a name that is merely missing passes.

    Args:
        logged: The names that the sanity check has logged.
        monitor: The name to find.
        owner: The callback that monitors it.

    Returns:
        The message, or None.
    """
    if monitor in logged or "train" in monitor:
        return None
    alike = difflib.get_close_matches(monitor, sorted(logged), n=1, cutoff=_TYPO)
    if not alike or _without_numbers(alike[0]) == _without_numbers(monitor):
        return None
    return (
        f"{owner}(monitor={monitor!r}): the sanity check has logged {', '.join(map(repr, sorted(logged)))}. Did you "
        f"mean {alike[0]!r}? If {monitor!r} is logged later, leave the sanity check out: "
        "Trainer(num_sanity_val_steps=0)."
    )


_TYPO = 0.85  # 'val_los' for 'val_loss' has 0.93, 'train_loss' 0.67


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)


def missing_metric_message(metrics: Mapping[str, Any], monitor: str, owner: str) -> str:
    """The message that a metric is not there: which ones are, and what to do."""
    if metrics:
        there = f"Logged so far: {', '.join(map(repr, sorted(metrics)))}.{nearest(monitor, metrics)}"
    else:
        there = "Nothing was logged so far."
    return (
        f"{owner}(monitor={monitor!r}): no metric of this name was logged. {there} "
        f"Log it with self.log({monitor!r}, value) in a step of the task, or monitor another one."
    )
