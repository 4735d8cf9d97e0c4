"""`TensorBoardLogger`."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.loggers.files import TensorBoardLogger

__all__ = ["TensorBoardLogger"]
