"""Base class of precision plugins."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import Precision, under_old_name

__all__ = ["Precision", "PrecisionPlugin"]

PrecisionPlugin = under_old_name("PrecisionPlugin", Precision)
