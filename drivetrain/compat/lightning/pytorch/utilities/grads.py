"""Gradient norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, float]:
    """Return the norm of each parameter's gradient, and the total norm."""
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf', got {norm_type}.")
    norms: dict[str, Any] = {
        f"grad_{order}_norm{group_separator}{name}": parameter.grad.data.norm(order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack(list(norms.values())).norm(order)
    return norms
