"""The base of enums."""

from __future__ import annotations

from drivetrain.compat.lightning.enums import LightningEnum

__all__ = ["LightningEnum"]
