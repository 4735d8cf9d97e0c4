"""`AdvancedProfiler`."""

from __future__ import annotations

from drivetrain.trainer.profilers import AdvancedProfiler

__all__ = ["AdvancedProfiler"]
