"""Profilers, which are not here yet."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import PROFILER

_ABSENT = (
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "XLAProfiler",
)

__getattr__ = absent_names(__name__, (PROFILER, _ABSENT))
