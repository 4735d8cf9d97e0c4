"""One logged value: kept as detached tensors, added up rarely, and turned into a number only where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.trainer.metrics.log_scopes import LogScope

FOLD_AFTER = 64
"""Values of one name that are kept before they are added up on the device."""

REDUCTIONS = ("mean", "sum", "max", "min")

Value = Tensor | float
Reduction = str | Callable[[Tensor], Any]
Arguments = tuple[Any, ...]


class LoggedValue:
    """All that was logged under one name in one stage.

    Args:
        name: The name, with the loader's number where there are several.
        arguments: What `self.log` was called with; every later call must be the same.
        scope: From where.
        on_step: Whether each step's value is shown and written.
        on_epoch: Whether the epoch's reduction is.
        prog_bar: Whether the progress bar shows it.
        logger: Whether trackers get it.
        reduction: `"mean"`, `"sum"`, `"max"`, `"min"`, or a function of the stacked values.
        sync: Whether it is reduced over processes.
        main_only: Whether only the main process's values count.
        metric: The torchmetrics object, if one was logged.
        metric_path: Where in the task the metric is.
        loader: The number of the loader that it belongs to, if there are several and it is of one.
        suffix: The part of the name that marks it, its end.

    Attributes:
        stepped: Whether a step has logged it, and nothing has taken the step's value since.
    """

    __slots__ = (
        "_pending",
        "_weights",
        "arguments",
        "fresh",
        "last",
        "loader",
        "logger",
        "main_only",
        "metric",
        "metric_path",
        "name",
        "on_epoch",
        "on_step",
        "prog_bar",
        "reduction",
        "scope",
        "stepped",
        "suffix",
        "sync",
        "synced",
        "total",
        "weighs",
        "weight",
    )

    def __init__(
        self,
        name: str,
        arguments: Arguments,
        scope: LogScope,
        *,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        reduction: Reduction,
        sync: bool | None,
        main_only: bool,
        metric: Any = None,
        metric_path: str | None = None,
        loader: int | None = None,
        suffix: str = "",
    ) -> None:
        self.name, self.arguments, self.scope = name, arguments, scope
        self.on_step, self.on_epoch = on_step, on_epoch
        self.prog_bar, self.logger = prog_bar, logger
        self.reduction, self.sync, self.main_only = reduction, sync, main_only
        self.metric, self.metric_path = metric, metric_path
        self.loader, self.suffix = loader, suffix
        self.weighs = on_epoch and reduction == "mean" and metric is None
        self.reset()

    @property
    def step_name(self) -> str:
        """Its name among a step's values."""
        return self._forked("_step") if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        """Its name among an epoch's values."""
        return self._forked("_epoch") if self.on_step else self.name

    def _forked(self, ending: str) -> str:
        return self.name.removesuffix(self.suffix) + ending + self.suffix

    def reset(self) -> None:
        """Forget all values."""
        self.fresh = self.stepped = False
        self.last: Value | None = None
        self.synced: Value | None = None  # the last value, where it is that of all processes
        self.total: Any = None
        self.weight: float = 0.0
        self._pending: list[Value] = []
        self._weights: list[float] = []

    def update(self, value: Value, weight: float) -> None:
        """Keep one value; nothing is computed until enough have come together."""
        self.fresh = True
        if self.on_step:
            self.last, self.stepped = value, True
        if self.on_epoch:
            self._pending.append(value)
            self._weights.append(weight)
            if len(self._pending) >= FOLD_AFTER and not callable(self.reduction):
                self.fold()

    def fold(self) -> None:
        """Bring the values kept so far into one total, on their device."""
        if not self._pending:
            return
        values, weights = _stack(self._pending), self._weights
        self._pending, self._weights = [], []
        self.weight += sum(weights)
        if callable(self.reduction):
            part: Any = values
            self.total = part if self.total is None else torch.cat([self.total, part])
        elif self.reduction in ("mean", "sum"):
            if self.reduction == "mean":
                values = values * torch.tensor(weights, dtype=values.dtype).to(values.device, non_blocking=True)
            part = values.sum()
            self.total = part if self.total is None else self.total + part
        else:
            pick = torch.amax if self.reduction == "max" else torch.amin
            part = pick(values, 0)
            self.total = part if self.total is None else pick(torch.stack([self.total, part]), 0)

    def mark(self) -> Mark:
        """Where it stands now, for `state_dict` of a later moment; nothing is copied."""
        return Mark(self.total, self.weight, self._pending, self._weights, len(self._pending), self.last, self.fresh)

    def state_dict(self, mark: Mark | None = None) -> dict[str, Any]:
        """What was kept so far, not added up: adding later must give what it would have given without a checkpoint.

        Args:
            mark: Give what had been kept then instead.
        """
        then = mark or self.mark()
        pending = then.pending[: then.kept]
        return {
            **self.portable(fold=False),
            "on_step": self.on_step,
            "on_epoch": self.on_epoch,
            "total": then.total,
            "weight": then.weight,
            "pending": _stack(pending) if pending else None,
            "weights": then.weights[: then.kept],
            "last": then.last,
            "fresh": then.fresh,
        }

    def take_over(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Resume from what `state_dict` returned."""
        pending, total = state["pending"], state["total"]
        self.total = None if total is None else total.to(device)
        self.weight = state["weight"]
        self._pending = [] if pending is None else list(pending.to(device).unbind())
        self._weights = list(state["weights"])
        self.last = state["last"]
        self.fresh = state["fresh"]

    def adopt(self, restored: LoggedValue) -> None:
        """Resume from an entry that came from a checkpoint, now that the name is logged again."""
        for slot in ("total", "weight", "_pending", "_weights", "last", "fresh"):
            setattr(self, slot, getattr(restored, slot))

    def portable(self, fold: bool = True) -> dict[str, Any]:
        """The local result as plain values, for the exchange between processes."""
        if fold:
            self.fold()
        return {
            "name": self.name,
            "total": None if self.total is None else self.total.tolist(),
            "weight": self.weight,
            "metric": self.metric_path,
            "epoch_name": self.epoch_name,
            "prog_bar": self.prog_bar,
            "logger": self.logger,
            "reduction": None if callable(self.reduction) else self.reduction,
            "sync": self.sync,
            "main_only": self.main_only,
            "loader": self.loader,
        }


class Mark(NamedTuple):
    """What a logged value held at one moment.

    The lists are the value's own: they only grow until they are replaced, so their first `kept` items stay.
    """

    total: Any
    weight: float
    pending: list[Value]
    weights: list[float]
    kept: int
    last: Value | None
    fresh: bool


class EpochValue(NamedTuple):
    """One value of an epoch.

    Attributes:
        name: The name it was logged under.
        epoch_name: Its name where each step's value is kept too.
        prog_bar: Whether the progress bar shows it.
        logger: Whether trackers get it.
        value: The value.
        loader: The number of the loader that it belongs to, None if it belongs to all.
    """

    name: str
    epoch_name: str
    prog_bar: bool
    logger: bool
    value: Value
    loader: int | None


def to_numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """Turn values into Python numbers, with one transfer from the device for all of them."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    if tensors:
        stacked = torch.stack([_wide(tensor.reshape(())) for tensor in tensors.values()])
        numbers.update(zip(tensors, stacked.tolist(), strict=True))
    return {name: numbers[name] for name in values}


def _stack(values: list[Value]) -> Tensor:
    """Values as one wide vector, on the device of the first tensor among them."""
    device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack([_wide(value.reshape(())) for value in values])  # type: ignore[union-attr]
    return torch.stack([_wide(_as_tensor(value).reshape(()).to(device)) for value in values])


def _as_tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _wide(value: Tensor) -> Tensor:
    """In 64 bits, so that a mean over many steps stays exact; in 32 on the one device kind that has no 64."""
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)
