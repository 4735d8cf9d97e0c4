"""`StepModule`: what a Trainer gives a strategy to wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class StepModule(nn.Module):
    """A module whose forward is whichever of its owner's steps it is handed.

    Wrappers such as DDP hook into `forward`; running `training_step` through this module lets them.

    Args:
        task: the module that the steps belong to.
        partial_backwards: whether one step may run several backwards, each over some of the parameters.
    """

    def __init__(self, task: nn.Module, partial_backwards: bool = False) -> None:
        super().__init__()
        self.task = task
        self.partial_backwards = partial_backwards

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `step`."""
        return step(*args, **kwargs)
