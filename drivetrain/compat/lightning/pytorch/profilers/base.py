"""`PassThroughProfiler`."""

from __future__ import annotations

from drivetrain.trainer.profilers import PassThroughProfiler

__all__ = ["PassThroughProfiler"]
