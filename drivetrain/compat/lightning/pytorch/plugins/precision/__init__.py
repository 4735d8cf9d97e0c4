"""Precision plugins."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import (
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

__all__ = ["DeepSpeedPrecision", "DoublePrecision", "FSDPPrecision", "HalfPrecision", "MixedPrecision", "Precision"]
