"""Enums."""

from __future__ import annotations

from drivetrain.compat.lightning.enums import GradClipAlgorithmType, LightningEnum

__all__ = ["GradClipAlgorithmType", "LightningEnum"]
