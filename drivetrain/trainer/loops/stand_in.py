"""A batch that `training_step` leaves out, where the peers wait for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from drivetrain.strategies import StepModule, Strategy
from drivetrain.strategies.step_module import ATTACHES_PRESENCE


class StandIn:
    """Gives gradients of zero for what a task leaves out, and finds out whether every process left its batches out.

    A module that a strategy wrapped may have a parameter `presence`, a zero that every real loss is added to: its
    gradient, reduced with the others, is above zero where any process had a real batch.

    Args:
        strategy: Makes losses with gradients of zero.
        task: The task.
        model: The module to call.
        names: Those of the losses that a step returns, where it returns several.

    Attributes:
        stood_in: Whether the last step was left out.
    """

    def __init__(self, strategy: Strategy, task: nn.Module, model: nn.Module, names: Sequence[str] = ()) -> None:
        self._names = names
        self._zero_loss = strategy.gradients.zero_loss
        self._task = task
        self._shares_batches = strategy.topology.data_shard.count == 1
        self._presence = presence_of(model)
        self.stood_in = False

    def replacing(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that never leaves a batch out.

        What stands in must come from the output of the forward, by which DDP learns what takes part in the backward.

        Args:
            step: The task's method.
        """
        presence = self._presence

        def step_or_stand_in(*args: Any) -> Any:
            output = step(*args)
            self.stood_in = output is None
            if output is None:
                zero = self._zero_loss(self._task)
                zero = zero if presence is None else zero + presence * 0.0
                return dict.fromkeys(self._names, zero) if self._names else zero
            return output if presence is None else _attached(output, presence, *self._names[:1])

        setattr(step_or_stand_in, ATTACHES_PRESENCE, True)
        return step_or_stand_in

    @property
    def leaves(self) -> list[Tensor]:
        """What receives a gradient beside the parameters of the task."""
        return [] if self._presence is None else [self._presence]

    def anyone_took_part(self) -> bool:
        """Whether another process had a real batch in this window; call it where this one had none."""
        if self._presence is not None:
            return self._presence.grad is not None and float(self._presence.grad) != 0.0
        return not self._shares_batches


def presence_of(model: nn.Module | None) -> nn.Parameter | None:
    """The parameter by which processes learn that one of them had a real batch, where the strategy made one."""
    if model is None:
        return None
    return next((module.presence for module in model.modules() if isinstance(module, StepModule)), None)


def _attached(output: Any, presence: nn.Parameter, name: str = "loss") -> Any:
    if isinstance(output, Tensor):
        return _added(output, presence)
    if isinstance(output, Mapping) and isinstance(output.get(name), Tensor):
        return {**output, name: _added(output[name], presence)}
    return output


def _added(loss: Tensor, presence: nn.Parameter) -> Tensor:
    # What cannot be differentiated is refused later, in words that a sum with a parameter would hide.
    return loss + presence.to(loss.dtype) if loss.requires_grad and loss.numel() == 1 else loss
