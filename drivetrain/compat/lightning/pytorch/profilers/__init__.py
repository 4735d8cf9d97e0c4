"""Profilers: those of `drivetrain.trainer.profilers`."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.pytorch.profilers.pytorch import PyTorchProfiler
from drivetrain.trainer.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    SimpleProfiler,
    XLAProfiler,
)

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler", "XLAProfiler"]

__getattr__ = absent_names(__name__)
