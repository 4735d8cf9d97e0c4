"""`XLAProfiler`."""

from __future__ import annotations

from drivetrain.trainer.profilers import XLAProfiler

__all__ = ["XLAProfiler"]
