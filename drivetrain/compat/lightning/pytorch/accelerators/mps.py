"""`MPSAccelerator`."""

from __future__ import annotations

from drivetrain.compat.lightning.accelerators import MPSAccelerator

__all__ = ["MPSAccelerator"]
