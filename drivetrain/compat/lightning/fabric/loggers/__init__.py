"""Loggers."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.fabric.loggers.csv_logs import CSVLogger
from drivetrain.compat.lightning.fabric.loggers.tensorboard import TensorBoardLogger
from drivetrain.compat.lightning.pytorch.loggers import Logger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]

__getattr__ = absent_names(__name__)
