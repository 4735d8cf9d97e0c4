"""Half precision."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import HalfPrecision

__all__ = ["HalfPrecision"]
