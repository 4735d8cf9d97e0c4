"""A prepared optimizer: steps only where an accumulation window ends, and knows when a step was skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from drivetrain.accelerator.accelerator import Accelerator


class PreparedOptimizer(Optimizer):
    """What `Accelerator.prepare` returns for an optimizer; everything else is the optimizer's own.

    Args:
        optimizer: the user's optimizer, also found under `.optimizer`.
        accelerator: the engine that it steps through.

    Attributes:
        step_was_skipped: whether the last step was skipped on overflow.
        spent: whether the gradients held have been stepped with.
        holds_abandoned: whether they are those of a window whose loop was left before its step.
    """

    def __init__(self, optimizer: Optimizer, accelerator: Accelerator) -> None:
        # Not Optimizer.__init__: parameters, state and defaults are those of the optimizer inside.
        self.optimizer = optimizer
        self._step = accelerator.strategy.optimizer_step
        self._precision = accelerator.precision
        self._window = accelerator.accumulation
        self._finish_gradients = accelerator.finish_gradients
        self.step_was_skipped = False
        self.spent = False
        self.holds_abandoned = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The optimizer's own state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's own defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients that are not needed any more; those of the window under way accumulate.

        So it may stand before the backward or after the step, as the loop likes.
        """
        if self.spent or not self._window.holds_gradients:
            self.spent = self.holds_abandoned = False
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step, where a window ends."""
        if self._window.sync_gradients:
            if self._window.weighted:
                self._finish_gradients()
            self.step_was_skipped = not self._step(self.optimizer, self._precision, closure)
            self.spent = True
            self.holds_abandoned = False

    def train(self) -> Any:
        """Switch to training, for schedule-free optimizers."""
        return self.optimizer.train() if hasattr(self.optimizer, "train") else None

    def eval(self) -> Any:
        """Switch to evaluation, for schedule-free optimizers."""
        return self.optimizer.eval() if hasattr(self.optimizer, "eval") else None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's own state."""
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError("A prepared optimizer cannot be unpickled; pickle its `.optimizer` and prepare it again.")


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's own optimizer."""
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
