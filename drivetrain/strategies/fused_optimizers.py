"""Optimizers of torch step by its fused implementations where a script has left the choice open.

A fused optimizer updates all parameters in one call instead of a dozen calls for each. Its results are those of the
other implementations but for the rounding of a parameter's last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

IMPLEMENTATION = ("fused", "foreach")
"""The options of a group that say how a run steps; they are no part of what it has trained."""

_CHOSEN = "_fused_by_drivetrain"

# The devices that each has a kernel for; torch's own list is of all of its fused kernels together.
_ANYWHERE = ("cpu", "cuda", "xpu", "mps")
_DEVICES: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: _ANYWHERE,
    AdamW: _ANYWHERE,
    SGD: _ANYWHERE,
    Adagrad: ("cpu",),
}
# In a lower precision a fused step rounds once where the others round after each operation.
_DTYPES = (torch.float32, torch.float64)


def use_fused(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Let an optimizer step by torch's fused implementation, if it has one for its parameters.

    Args:
        optimizer: The bare optimizer, whose parameters are where they will be trained. It is left as it is where its
            `fused` or `foreach` was given, or something else that a fused step cannot do.
        models: The models; where one has layers with sparse gradients, the optimizer is left as it is.

    Returns:
        Whether it steps so now.
    """
    devices = _DEVICES.get(type(optimizer))
    if devices is None or not all(_takes_fused(group, devices) for group in optimizer.param_groups):
        return False
    if any(getattr(module, "sparse", False) is True for model in models for module in model.modules()):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.__dict__[_CHOSEN] = True
    return True


def options_given(optimizer: Optimizer) -> dict[str, None]:
    """The options of an optimizer's groups that were changed here, as the script gave them.

    Args:
        optimizer: The bare optimizer.
    """
    return {"fused": None} if _CHOSEN in optimizer.__dict__ else {}


def _takes_fused(group: dict[str, Any], devices: tuple[str, ...]) -> bool:
    is_chosen = group.get("fused") is not None or group.get("foreach") is not None
    is_special = group.get("differentiable") or group.get("capturable") or isinstance(group["lr"], Tensor)
    return not (is_chosen or is_special) and all(
        type(each) in (Tensor, nn.Parameter) and each.device.type in devices and each.dtype in _DTYPES
        for each in group["params"]
    )
