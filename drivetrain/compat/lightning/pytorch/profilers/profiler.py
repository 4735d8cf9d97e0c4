"""`Profiler`."""

from __future__ import annotations

from drivetrain.trainer.profilers import Profiler

__all__ = ["Profiler"]
