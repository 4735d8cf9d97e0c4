"""Stand-ins for what a DeepSpeed configuration defines itself: an optimizer, a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError


class DummyOptim(Optimizer):
    """Stands for the optimizer that the DeepSpeed configuration defines under `"optimizer"`.

    What is given here fills the `"auto"` values there.

    Args:
        params: The parameters, or groups of them.
        lr: Learning rate.
        weight_decay: Weight decay.
        **kwargs: Further values for `"auto"`, such as `betas`.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0, **kwargs: Any) -> None:
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **kwargs})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Refuse: there is nothing to step."""
        raise ConfigurationError(
            "DummyOptim only stands for the optimizer of a DeepSpeed configuration. Prepare it together with its model "
            "under strategy='deepspeed', and step what prepare returned.",
            code="DT-047",
        )


class DummyScheduler:
    """Stands for the scheduler that the DeepSpeed configuration defines under `"scheduler"`, which the engine steps.

    Args:
        optimizer: The optimizer that it is for.
        total_num_steps: Fills the `"auto"` of `total_num_steps`.
        warmup_num_steps: Fills that of `warmup_num_steps`.
        lr_scheduler_callable: Makes the scheduler from the engine's optimizer, where the configuration defines none.
        **kwargs: Further values for `"auto"`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs
        self.scheduler: Any = None
        _STANDING_IN[optimizer] = self

    def attach(self, scheduler: Any) -> None:
        """Take the engine's scheduler, whose state and rates are this one's from now on."""
        self.scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps its scheduler with each optimizer step."""

    def get_last_lr(self) -> list[float]:
        """The learning rates of the last step."""
        if self.scheduler is None:
            return [group["lr"] for group in self.optimizer.param_groups]
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The engine's scheduler's state."""
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the engine's scheduler's state."""
        if self.scheduler is not None and state:
            self.scheduler.load_state_dict(state)


def standing_in_for(optimizer: Optimizer) -> DummyScheduler | None:
    """The `DummyScheduler` that was made for an optimizer."""
    return _STANDING_IN.get(optimizer)


# A registry: what was made for an optimizer that may be another's class, found again when it is prepared.
_STANDING_IN: WeakKeyDictionary[Optimizer, DummyScheduler] = WeakKeyDictionary()
