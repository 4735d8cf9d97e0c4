"""Loggers."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
