"""Module that runs a task's steps through `forward`, so that wrappers such as DDP can hook into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.runtime.pytrees import recursively_apply

ATTACHES_PRESENCE = "attaches_presence"
"""Attribute that marks a step function whose loss already depends on the module's `presence` parameter."""


class StepModule(nn.Module):
    """Module that runs a task's steps in its `forward`, so that wrappers such as DDP reduce gradients.

    Wrappers hook into `forward` only. If the first argument is not a function, the task's own `forward` runs.

    Args:
        task: The module that owns the step functions.
        partial_backwards: True if one step may run several backward passes, each over some of the parameters.
        several_losses: True if a step returns several losses, each for some of the parameters.

    Attributes:
        presence: A zero parameter that the loss of each real batch depends on, or None. Its reduced gradient is above
            zero if any process had a real batch.
    """

    presence: nn.Parameter | None

    def __init__(self, task: nn.Module, partial_backwards: bool = False, several_losses: bool = False) -> None:
        super().__init__()
        self.task = task
        self.partial_backwards, self.several_losses = partial_backwards, several_losses
        self.register_parameter("presence", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A function in front, such as the task's training step, is called with the other arguments. Otherwise the
        # task's forward is.
        is_step = args and callable(args[0]) and not isinstance(args[0], nn.Module)
        output = args[0](*args[1:], **kwargs) if is_step else self.task(*args, **kwargs)
        if self.presence is None or not torch.is_grad_enabled() or (is_step and hasattr(args[0], ATTACHES_PRESENCE)):
            return output
        # DDP waits for the gradient of every parameter. In a user's own loss, `presence` takes part with zero. An old
        # gradient of a Trainer's step must not enter the norm that the user clips.
        self.presence.grad = None
        return recursively_apply(self._attach_presence, output)

    def _attach_presence(self, output: Tensor) -> Tensor:
        if self.presence is None or not output.requires_grad:
            return output
        return output + (self.presence * 0.0).to(output.dtype)
