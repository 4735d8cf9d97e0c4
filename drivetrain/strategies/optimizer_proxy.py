"""An optimizer in front of another one, whose groups, state and defaults it shows."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer


class OptimizerProxy(Optimizer):
    """Shows the groups, the state and the defaults of `self.optimizer`, which a subclass provides, as its own.

    A subclass does not call `Optimizer.__init__`, which would make groups of its own.
    """

    optimizer: Optimizer

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer, such as L-BFGS, cannot step without a closure."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
