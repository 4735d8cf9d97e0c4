"""`CheckpointIO`."""

from __future__ import annotations

from drivetrain.compat.lightning.checkpoint_io import CheckpointIO

__all__ = ["CheckpointIO"]
