"""`StepModule`: what a Trainer gives a strategy to wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain.runtime.nested import recursively_apply


class StepModule(nn.Module):
    """A module whose forward is whichever of its owner's steps it is handed.

    Wrappers such as DDP hook into `forward`; running `training_step` through this module lets them.

    Called with anything but a step, it is the task's own forward, so that a loop after `fit` may call it as a model.

    Args:
        task: the module that the steps belong to.
        partial_backwards: whether one step may run several backwards, each over some of the parameters.

    Attributes:
        presence: A zero that a step's real losses are added to, where a strategy makes one: its reduced gradient is
            above zero where any process had a real batch.
    """

    presence: nn.Parameter | None

    def __init__(self, task: nn.Module, partial_backwards: bool = False) -> None:
        super().__init__()
        self.task = task
        self.partial_backwards = partial_backwards
        self.register_parameter("presence", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step that is given first, with the other arguments; else the task's own forward."""
        if args and callable(args[0]) and not isinstance(args[0], nn.Module):
            return args[0](*args[1:], **kwargs)
        output = self.task(*args, **kwargs)
        presence = self.presence
        if presence is None or not torch.is_grad_enabled():
            return output
        # A part of the graph, since DDP waits for the gradients of all parameters.
        return recursively_apply(lambda t: t + presence.to(t.dtype) * 0 if t.requires_grad else t, output)
