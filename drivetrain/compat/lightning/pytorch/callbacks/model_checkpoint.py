"""`ModelCheckpoint`."""

from __future__ import annotations

from drivetrain.callbacks import ModelCheckpoint
from drivetrain.compat.lightning.pytorch.callbacks.checkpoint import Checkpoint

__all__ = ["ModelCheckpoint"]

Checkpoint.register(ModelCheckpoint)
