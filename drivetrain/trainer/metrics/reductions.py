"""One value out of what each process has kept of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.trainer.metrics.logged_value import REDUCTIONS, LoggedValue, Reduction, Value

_COMBINE: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


def reduced(entry: LoggedValue | None, local: dict[str, Any] | None, everyone: list[dict[str, Any]]) -> Value | None:
    """One value from the totals of all processes, or from this one's own where it is not synchronised."""
    first = everyone[0]
    parts = everyone
    if first["sync"] is False:
        parts = [local] if local is not None else []
    elif first["main_only"]:
        parts = everyone[:1]
    parts = [part for part in parts if part["total"] is not None]
    if not parts:
        return None
    if first["reduction"] is None:
        if entry is None or not callable(entry.reduction):
            return None
        # In turn, as the batches came: a function may ask for the last value.
        turns = zip_longest(*(part["total"] for part in parts))
        stacked = torch.tensor([value for turn in turns for value in turn if value is not None], dtype=torch.float64)
        return torch.as_tensor(entry.reduction(stacked))
    totals = [part["total"] for part in parts]
    if first["reduction"] == "mean":
        weight = sum(part["weight"] for part in parts)
        return torch.tensor(sum(totals) / weight if weight else float("nan"), dtype=torch.float64)
    return torch.tensor(_COMBINE[first["reduction"]](totals), dtype=torch.float64)


def combine_plain(reduction: Reduction, values: list[float]) -> float:
    """One number from those of several processes."""
    if callable(reduction):
        return float(reduction(torch.tensor(values, dtype=torch.float64)))
    if reduction == "mean":
        return sum(values) / len(values)
    return float(_COMBINE[reduction](values))


def reduction_of(name: str, reduce_fx: Any) -> Reduction:
    """What `self.log(reduce_fx=)` means.

    Args:
        name: The name of the value, for errors.
        reduce_fx: What was given.

    Raises:
        ConfigurationError: There is no such reduction.
    """
    if callable(reduce_fx):
        return reduce_fx  # type: ignore[no-any-return]
    word = str(reduce_fx).lower()
    word = "mean" if word == "avg" else word
    if not isinstance(reduce_fx, str) or word not in REDUCTIONS:
        raise ConfigurationError(
            f"log({name!r}, reduce_fx={reduce_fx!r}): allowed are {', '.join(REDUCTIONS)} or a function of the "
            f"stacked values.{nearest(word, REDUCTIONS)}",
            code="DT-001",
        )
    return word
