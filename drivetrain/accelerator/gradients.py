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
        owners = [
            *(model.parameters() for model in self._prepared.models),
            *map(parameters_of, self._prepared.optimizers),
        ]
        parameters = {id(parameter): parameter for owner in owners for parameter in owner}
        gradients = [local_part(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]
        for model in self._prepared.models:
            gradients.extend(self._strategy.gradients.held(model))
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
