"""Nested data."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.compat.lightning.fabric.utilities import move_data_to_device
from drivetrain.runtime.nested import recursively_apply

__all__ = ["convert_tensors_to_scalars", "move_data_to_device"]


def convert_tensors_to_scalars(data: Any) -> Any:
    """Turn every tensor of one element into its number.

    Args:
        data: Nested data.
    """
    return recursively_apply(lambda tensor: tensor.item() if tensor.numel() == 1 else tensor, data)


_DEVICE = torch.device | str | int
