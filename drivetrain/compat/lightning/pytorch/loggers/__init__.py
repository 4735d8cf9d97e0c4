"""Loggers."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.pytorch.loggers.comet import CometLogger
from drivetrain.compat.lightning.pytorch.loggers.files import CSVLogger, TensorBoardLogger
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger
from drivetrain.compat.lightning.pytorch.loggers.mlflow import MLFlowLogger
from drivetrain.compat.lightning.pytorch.loggers.wandb import WandbLogger
from drivetrain.compat.lightning.reasons import LOGGER

__all__ = ["CSVLogger", "CometLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]

_ABSENT = ("LitLogger", "NeptuneLogger")

__getattr__ = absent_names(__name__, (LOGGER, _ABSENT))
