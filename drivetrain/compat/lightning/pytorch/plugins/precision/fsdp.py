"""Precision of FSDP models."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import FSDPPrecision, under_old_name

__all__ = ["FSDPMixedPrecisionPlugin", "FSDPPrecision", "FSDPPrecisionPlugin"]

FSDPMixedPrecisionPlugin = under_old_name("FSDPMixedPrecisionPlugin", FSDPPrecision, "device")
FSDPPrecisionPlugin = under_old_name("FSDPPrecisionPlugin", FSDPPrecision)
