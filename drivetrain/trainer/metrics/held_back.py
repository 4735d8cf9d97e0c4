"""What the parts of a micro-batch log, taken once for the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.trainer.metrics.logged_values import LoggedValues

_REDUCTION = 4  # among the arguments


class _Call(NamedTuple):
    """One call of `self.log`: its value, arguments and rows, and whether these were given with it."""

    value: Any
    arguments: tuple[Any, ...]
    rows: float
    rows_given: bool


class HeldBack:
    """Collects what is logged in the parts of micro-batches, and logs it as if each had been computed whole.

    Args:
        logged: Where it is logged in the end.
    """

    def __init__(self, logged: LoggedValues) -> None:
        self._logged = logged
        self._parts: dict[int, list[dict[tuple[str, int], _Call]]] = {}

    def clear(self) -> None:
        """Forget what was collected."""
        self._parts.clear()

    @contextmanager
    def collecting(self, place: int) -> Iterator[None]:
        """Collect what the body logs, as that of a part.

        Args:
            place: Which micro-batch it is a part of.
        """
        calls: dict[tuple[str, int], _Call] = {}
        self._parts.setdefault(place, []).append(calls)
        with self._logged.diverted() as diverted:
            yield
        for name, value, arguments, given in diverted:
            number = sum(known == name for known, _ in calls)
            rows = self._logged.rows_of_batch() if given is None else given
            calls[name, number] = _Call(value, arguments, rows, given is not None)

    def log(self, place: int) -> None:
        """Log what a micro-batch has logged, each value once.

        Args:
            place: Which micro-batch.
        """
        parts = self._parts.get(place, [])
        for key in dict.fromkeys(key for calls in parts for key in calls):
            found = [calls[key] for calls in parts if key in calls]
            rows = sum(call.rows for call in found) if found[0].rows_given else None
            self._logged.log(key[0], _combined(found), found[0].arguments, rows)


def _combined(calls: Sequence[_Call]) -> Any:
    """The value of a whole micro-batch, from those of its parts."""
    if len(calls) == 1 or not isinstance(calls[0].value, (Tensor, Number)):
        return calls[-1].value  # a metric has gathered all parts itself
    reduction = calls[0].arguments[_REDUCTION]
    stacked = torch.stack([torch.as_tensor(call.value).reshape(()) for call in calls])
    if reduction in ("sum", "max", "min"):
        return getattr(stacked, reduction)()
    weights = torch.tensor([call.rows for call in calls], dtype=torch.float32, device=stacked.device)
    return (stacked.float() * weights).sum() / weights.sum()
