"""Double precision."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import DoublePrecision

__all__ = ["DoublePrecision"]
