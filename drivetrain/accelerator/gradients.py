"""The gradients that accumulate in what an Accelerator has prepared."""

from __future__ import annotations

import torch

from drivetrain.accelerator.prepared import Prepared, parameters_of
from drivetrain.strategies import Strategy
from drivetrain.strategies.gradients import local_part


class HeldGradients:
    """What an accumulation window does to the gradients that it holds where it does not end as planned.

    Args:
        prepared: The models and optimizers.
        strategy: Holds gradients that are not in `.grad` before they are reduced.
    """

    def __init__(self, prepared: Prepared, strategy: Strategy) -> None:
        self._prepared = prepared
        self._strategy = strategy

    def scale(self, factor: float) -> None:
        """Multiply the gradients, where a window turns out to hold another number of micro-batches than planned."""
        done: set[int] = set()
        for model in self._prepared.models:
            own = [parameter for parameter in model.parameters() if id(parameter) not in done]
            done.update(map(id, own))
            self._strategy.gradients.scale_held(model, own, factor)
        others = (parameter for optimizer in self._prepared.optimizers for parameter in parameters_of(optimizer))
        rest = {id(parameter): parameter for parameter in others if id(parameter) not in done}
        gradients = [local_part(parameter.grad) for parameter in rest.values() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def abandon(self) -> None:
        """Record that a loop has ended: gradients that no step was taken with until then belong to no window."""
        for optimizer in self._prepared.optimizers:
            optimizer.holds_abandoned = not optimizer.spent and any(
                parameter.grad is not None for parameter in parameters_of(optimizer)
            )

    def discard_abandoned(self) -> None:
        """Clear what such a loop left behind, unless its user has stepped with it or cleared it."""
        for model in self._prepared.models:
            self._strategy.gradients.discard(model)
        for optimizer in self._prepared.optimizers:
            if optimizer.holds_abandoned:
                optimizer.holds_abandoned = False
                optimizer.optimizer.zero_grad()
