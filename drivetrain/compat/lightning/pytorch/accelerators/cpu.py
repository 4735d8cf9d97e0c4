"""`CPUAccelerator`."""

from __future__ import annotations

from drivetrain.compat.lightning.accelerators import CPUAccelerator

__all__ = ["CPUAccelerator"]
