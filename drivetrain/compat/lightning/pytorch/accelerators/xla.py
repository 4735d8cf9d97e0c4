"""`XLAAccelerator`."""

from __future__ import annotations

from drivetrain.compat.lightning.accelerators import XLAAccelerator

__all__ = ["XLAAccelerator"]
