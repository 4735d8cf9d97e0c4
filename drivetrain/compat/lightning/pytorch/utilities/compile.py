"""Support for modules that `torch.compile` has compiled."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.pytorch.core.module import LightningModule
from drivetrain.trainer.compiling import is_compiled, leave_compiled, uncompiled


def from_compiled(model: Any) -> LightningModule:
    """Return the module behind `torch.compile(module)`, with compiled forward and step methods."""
    found = uncompiled(model)
    if found is model or not isinstance(found, LightningModule):
        raise ValueError(f"`model` is required to be a compiled LightningModule. Found a `{type(model).__name__}`.")
    return found


def to_uncompiled(model: Any) -> LightningModule:
    """Return the module without compilation."""
    found = uncompiled(model)
    if not isinstance(found, LightningModule) or not is_compiled(found):
        raise ValueError(f"`model` is required to be a compiled LightningModule. Found a `{type(model).__name__}`.")
    leave_compiled(found)
    return found
