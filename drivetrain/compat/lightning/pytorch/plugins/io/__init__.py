"""Plugins that write, read and remove checkpoints."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.checkpoint_io import CheckpointIO, TorchCheckpointIO
from drivetrain.compat.lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO
from drivetrain.compat.lightning.reasons import XLA_FILES

__all__ = ["AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO"]

__getattr__ = absent_names(__name__, (XLA_FILES, ("XLACheckpointIO",)))
