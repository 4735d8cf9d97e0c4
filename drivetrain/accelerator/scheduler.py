"""A prepared learning-rate scheduler: steps when its optimizers do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from drivetrain.accelerator.accumulation import AccumulationWindow
from drivetrain.accelerator.optimizer import PreparedOptimizer


class PreparedScheduler:
    """What `Accelerator.prepare` returns for a scheduler.

    Args:
        scheduler: The user's scheduler, also found under `.scheduler`.
        optimizers: The prepared optimizers; a step that one of them skipped on overflow is skipped here too.
        window: The accumulation window.
        steps_per_call: How often the scheduler steps for one optimizer step. Scripts moved from Accelerate count
            on one per process, since they write schedules for the loader as it was before it was sharded. One that
            watches a metric steps once whatever this is: the metric is one, and its patience counts it.
        with_optimizer: Whether to follow the optimizers at all; if not, every call steps once.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        window: AccumulationWindow,
        steps_per_call: int = 1,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self._window = window
        self._with_optimizer = with_optimizer
        watches = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._steps_per_call = 1 if watches else steps_per_call

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the optimizers did."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._window.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._steps_per_call):
            # One-cycle schedules raise past their end, which the steps of several processes may overshoot.
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy follows no engine: it steps whenever it is called.
        return _alone, (self.scheduler, self._steps_per_call)

    def get_last_lr(self) -> Any:
        """The learning rates of the last step."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's own state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _alone(scheduler: Any, steps_per_call: int) -> PreparedScheduler:
    """A prepared scheduler as it comes out of a pickle or a deep copy."""
    always: Any = SimpleNamespace(sync_gradients=True)
    return PreparedScheduler(scheduler, [], always, steps_per_call)


def cover_new_groups(scheduler: Any) -> None:
    """Let a scheduler of torch's step the parameter groups that its optimizer got after the scheduler was made.

    A new group follows the schedule of the first one, in the proportion that their rates have now. Without this a
    schedule that keeps a value for each group, such as `LambdaLR` or `OneCycleLR`, fails at its next step.

    Args:
        scheduler: The scheduler, also one of several others.
    """
    for each in _with_parts(scheduler):
        known = getattr(each, "base_lrs", getattr(each, "min_lrs", None))
        optimizer = getattr(each, "optimizer", None)
        if isinstance(known, list) and known and isinstance(optimizer, torch.optim.Optimizer):
            for number in range(len(known), len(optimizer.param_groups)):
                _cover_group(each, optimizer.param_groups, number)


def follow_group_rate(scheduler: Any, number: int) -> None:
    """Let the schedule of a group continue from the rate that the group was given.

    Args:
        scheduler: The scheduler, also one of several others.
        number: Which group of the optimizer, from 1.
    """
    for each in _with_parts(scheduler):
        if isinstance(getattr(each, "base_lrs", None), list):
            _cover_group(each, each.optimizer.param_groups, number)


def _cover_group(scheduler: Any, groups: list[dict[str, Any]], number: int) -> None:
    """Give a group the first one's values, those of rates in the proportion of the two rates."""
    first, group = groups[0], groups[number]
    rate, own = float(first["lr"]), float(group["lr"])
    ratio = own / rate if rate else 1.0
    for name in ("base_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas", "min_lrs"):
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and values:
            values[number : number + 1] = [values[0] * ratio if name in ("base_lrs", "max_lrs") else values[0]]
    for key in ("initial_lr", "max_lr", "min_lr"):
        if key in first:
            group[key] = first[key] * ratio
    for key in ("base_momentum", "max_momentum"):
        if key in first:
            group[key] = first[key]


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those that it steps, which torch (2.13) shows under no public name."""
    yield scheduler
    for part in vars(scheduler).get("_schedulers", ()):
        yield from _with_parts(part)
