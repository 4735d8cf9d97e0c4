"""The prepared optimizer under Accelerate's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.accelerator import PreparedOptimizer
from drivetrain.compat.accelerate.state import AcceleratorState, GradientState, latest_or_refused
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.pytrees import send_to_device

if TYPE_CHECKING:
    from drivetrain.compat.accelerate.accelerator import Accelerator

__all__ = ["AcceleratedOptimizer", "move_to_device"]


class AcceleratedOptimizer(PreparedOptimizer):
    """Prepared optimizer with the attributes that only Accelerate's scripts use.

    Attributes:
        accelerator: The Accelerator that prepared it.
        device_placement: The argument of the constructor.
        loose: Parameters that belonged to no model when the optimizer was prepared.
    """

    _is_accelerate_prepared = True
    loose: Sequence[Tensor] = ()
    device_placement = True
    accelerator: Accelerator

    def __init__(
        self, optimizer: Optimizer, device_placement: bool = True, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        engine = latest_or_refused(type(self).__name__)
        super().__init__(optimizer, engine.optimizer_step, engine.prepared, engine.strategy)
        self.accelerator, self.device_placement = engine, device_placement
        if scaler is not None:
            self.scaler = scaler

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler that all optimizers of an Accelerator share, or None if the loss is not scaled."""
        return self.accelerator.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not self.accelerator.scaler:
            raise ConfigurationError(
                "optimizer.scaler was given another loss scaler than its Accelerator has. All optimizers share one: "
                "assign accelerator.scaler, before optimizer.scaler.",
            )

    @property
    def accelerator_state(self) -> AcceleratorState:
        """State of the Accelerator."""
        return self.accelerator.state

    @property
    def gradient_state(self) -> GradientState:
        """State of the gradient accumulation window."""
        return self.accelerator.gradient_state

    @property
    def _is_overflow(self) -> bool:
        return self.step_was_skipped

    @_is_overflow.setter
    def _is_overflow(self, value: bool) -> None:
        self.step_was_skipped = value

    def _switch_parameters(self, parameters_map: dict[Any, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [parameters_map.get(each, each) for each in group["params"]]


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Return a nested structure with its tensors moved to a device."""
    return send_to_device(state, device)
