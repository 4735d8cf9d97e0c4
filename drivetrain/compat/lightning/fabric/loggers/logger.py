"""The base of loggers."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.loggers.logger import Logger, rank_zero_experiment

__all__ = ["Logger", "rank_zero_experiment"]
