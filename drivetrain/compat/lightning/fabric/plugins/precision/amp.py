"""Mixed precision."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import MixedPrecision

__all__ = ["MixedPrecision"]
