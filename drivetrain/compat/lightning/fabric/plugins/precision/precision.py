"""The base of number formats."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import Precision

__all__ = ["Precision"]
