"""`SimpleProfiler`."""

from __future__ import annotations

from drivetrain.trainer.profilers import SimpleProfiler

__all__ = ["SimpleProfiler"]
