"""Half precision."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import HalfPrecision, under_old_name

__all__ = ["HalfPrecision", "HalfPrecisionPlugin"]

HalfPrecisionPlugin = under_old_name("HalfPrecisionPlugin", HalfPrecision)
