"""`CSVLogger`."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.loggers.experiment_writer import ExperimentWriter
from drivetrain.compat.lightning.pytorch.loggers.files import CSVLogger

__all__ = ["CSVLogger", "ExperimentWriter"]
