"""Copies of logged values to the host, for all of which it waits once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


def to_numbers(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Convert values to Python floats, with a single transfer from each device."""
    return to_lists({name: value.reshape(()) if isinstance(value, Tensor) else value for name, value in values.items()})


def to_lists(values: Mapping[K, Tensor | float]) -> dict[K, Any]:
    """Return `value.tolist()` of each tensor, with a single transfer from each device.

    Numbers stay as they are.
    """
    lists: dict[K, Any] = dict(values)
    by_device: dict[torch.device, dict[K, Tensor]] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, {})[key] = value
    for tensors in by_device.values():
        copied = torch.cat([wide(tensor.reshape(-1)) for tensor in tensors.values()]).cpu()
        parts = torch.split(copied, [tensor.numel() for tensor in tensors.values()])
        for (key, tensor), part in zip(tensors.items(), parts, strict=True):
            lists[key] = part.reshape(tensor.shape).tolist()
    return lists


def on_cpu(values: Mapping[K, Tensor | float]) -> dict[K, Tensor | float]:
    elsewhere = {k: value for k, value in values.items() if isinstance(value, Tensor) and value.device.type != "cpu"}
    copied = to_lists(elsewhere)
    return {**values, **{key: torch.tensor(copied[key], dtype=tensor.dtype) for key, tensor in elsewhere.items()}}


def wide(value: Tensor) -> Tensor:
    # float64 gives exact means over many steps, but MPS does not support it.
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)
