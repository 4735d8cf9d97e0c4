"""Precision of DeepSpeed models."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import DeepSpeedPrecision, under_old_name

__all__ = ["DeepSpeedPrecision", "DeepSpeedPrecisionPlugin"]

DeepSpeedPrecisionPlugin = under_old_name("DeepSpeedPrecisionPlugin", DeepSpeedPrecision)
