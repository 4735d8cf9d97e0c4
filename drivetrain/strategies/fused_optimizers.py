"""Optimizers of torch step by its fused implementations where a script has left the choice open.

A fused optimizer updates all parameters in one call instead of a dozen calls for each. Its results are those of the
other implementations but for the rounding of a parameter's last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

IMPLEMENTATION = ("fused", "foreach")
"""The options of a group that say how a run steps; they are no part of what it has trained."""

_CHOSEN = "_fused_by_drivetrain"  # the attribute of an optimizer that has the numbers of its groups that were changed

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
    optimizer.__dict__[_CHOSEN] = set(range(len(optimizer.param_groups)))
    # Weak, or the optimizer and what it holds would stay until the next collection of garbage.
    optimizer.__dict__["add_param_group"] = partial(_add_group, ref(optimizer), devices)
    return True


def options_given(optimizer: Optimizer, number: int) -> dict[str, None]:
    """The options of an optimizer's group that were changed here, as the script gave them.

    Args:
        optimizer: The bare optimizer.
        number: Of the group.
    """
    return {"fused": None} if number in optimizer.__dict__.get(_CHOSEN, ()) else {}


def _add_group(of: ref[Optimizer], devices: tuple[str, ...], param_group: dict[str, Any]) -> None:
    """Add a group, which steps fused as the others do where it can: it is `add_param_group` of an optimizer itself."""
    optimizer = of()
    assert optimizer is not None
    Optimizer.add_param_group(optimizer, param_group)  # torch's four have none of their own
    added = optimizer.param_groups[-1]
    if _takes_fused(added, devices):
        added["fused"] = True
        optimizer.__dict__[_CHOSEN].add(len(optimizer.param_groups) - 1)


def _takes_fused(group: dict[str, Any], devices: tuple[str, ...]) -> bool:
    is_chosen = group.get("fused") is not None or group.get("foreach") is not None
    is_special = group.get("differentiable") or group.get("capturable") or isinstance(group["lr"], Tensor)
    return not (is_chosen or is_special) and all(
        type(each) in (Tensor, nn.Parameter) and each.device.type in devices and each.dtype in _DTYPES
        for each in group["params"]
    )
