"""Modules, data modules and optimizers."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.pytorch.core.datamodule import LightningDataModule
from drivetrain.compat.lightning.pytorch.core.module import LightningModule

__all__ = ["LightningDataModule", "LightningModule"]

__getattr__ = absent_names(__name__)
