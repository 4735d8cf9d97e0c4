"""The prepared optimizer under Accelerate's name."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.accelerator import PreparedOptimizer as AcceleratedOptimizer
from drivetrain.runtime.nested import send_to_device

__all__ = ["AcceleratedOptimizer", "move_to_device"]


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """A nested state with its tensors on a device."""
    return send_to_device(state, device)
