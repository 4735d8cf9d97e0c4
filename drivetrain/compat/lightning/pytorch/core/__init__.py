"""What is trained, and its data."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.core.datamodule import LightningDataModule
from drivetrain.compat.lightning.pytorch.core.module import LightningModule

__all__ = ["LightningDataModule", "LightningModule"]
