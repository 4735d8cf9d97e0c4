"""`TorchCheckpointIO`."""

from __future__ import annotations

from drivetrain.compat.lightning.checkpoint_io import TorchCheckpointIO

__all__ = ["TorchCheckpointIO"]
