"""An optimizer around another one."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class OptimizerWrapper(Optimizer):
    """Steps and clears in its own way; groups, options and state are those of the optimizer inside.

    A subclass sets `optimizer`, and does not call `Optimizer.__init__`.

    Attributes:
        optimizer: the optimizer inside.
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
