"""`StepModule`: what a Trainer gives a strategy to wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime.pytrees import recursively_apply

ATTACHES_PRESENCE = "attaches_presence"
"""Attribute of a step whose loss the module's `presence` takes part in already."""


class StepModule(nn.Module):
    """A module whose forward is whichever of its owner's steps it is handed.

    Wrappers such as DDP hook into `forward`; running `training_step` through this module lets them.

    Called with anything but a step, it is the task's own forward, so that a loop after `fit` may call it as a model.

    Args:
        task: The module that the steps belong to.
        partial_backwards: Whether one step may run several backwards, each over some of the parameters.
        several_losses: Whether a step returns several losses, each for some of the parameters.

    Attributes:
        presence: A zero that a step's real losses are added to, where a strategy makes one: its reduced gradient is
            above zero where any process had a real batch.
    """

    presence: nn.Parameter | None

    def __init__(self, task: nn.Module, partial_backwards: bool = False, several_losses: bool = False) -> None:
        super().__init__()
        self.task = task
        self.partial_backwards, self.several_losses = partial_backwards, several_losses
        self.register_parameter("presence", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step that is given first, with the other arguments; else the task's own forward."""
        is_step = args and callable(args[0]) and not isinstance(args[0], nn.Module)
        output = args[0](*args[1:], **kwargs) if is_step else self.task(*args, **kwargs)
        if self.presence is None or not torch.is_grad_enabled() or (is_step and hasattr(args[0], ATTACHES_PRESENCE)):
            return output
        # The wrapper waits for the gradient of every parameter: this one takes part in a user's own loss with zero, and
        # what is left of a Trainer's step must not count in the norm that the user clips.
        self.presence.grad = None
        return recursively_apply(self._attach_presence, output)

    def _attach_presence(self, output: Tensor) -> Tensor:
        if self.presence is None or not output.requires_grad:
            return output
        return output + (self.presence * 0.0).to(output.dtype)
