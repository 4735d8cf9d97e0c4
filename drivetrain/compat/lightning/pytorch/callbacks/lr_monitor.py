"""`LearningRateMonitor`."""

from __future__ import annotations

from drivetrain.callbacks import LearningRateMonitor

__all__ = ["LearningRateMonitor"]
