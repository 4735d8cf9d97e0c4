"""Precision plugins."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.plugins import (
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

__all__ = ["DeepSpeedPrecision", "DoublePrecision", "FSDPPrecision", "HalfPrecision", "MixedPrecision", "Precision"]

__getattr__ = absent_names(__name__)
