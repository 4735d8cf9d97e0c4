"""`Timer`."""

from __future__ import annotations

from drivetrain.callbacks import Timer

__all__ = ["Timer"]
