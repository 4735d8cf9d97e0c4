"""Mixed precision."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import MixedPrecision, under_old_name

__all__ = ["MixedPrecision", "MixedPrecisionPlugin"]

MixedPrecisionPlugin = under_old_name("MixedPrecisionPlugin", MixedPrecision)
