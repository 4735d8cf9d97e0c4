"""Functions for nested structures."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.compat.lightning.fabric.utilities import move_data_to_device
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.pytrees import recursively_apply

__all__ = ["convert_tensors_to_scalars", "move_data_to_device"]


def convert_tensors_to_scalars(data: Any) -> Any:
    """Replace each one-element tensor in a nested structure by its number."""
    return recursively_apply(_number, data)


def _number(tensor: torch.Tensor) -> Any:
    if tensor.numel() != 1:
        raise ConfigurationError(
            f"A tensor of shape {tuple(tensor.shape)} does not contain a single element, thus it cannot be converted "
            "to a scalar. Give one number, such as tensor.mean().",
        )
    return tensor.item()


_DEVICE = torch.device | str | int
