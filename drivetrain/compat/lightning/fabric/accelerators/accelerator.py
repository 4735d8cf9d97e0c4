"""`Accelerator`."""

from __future__ import annotations

from drivetrain.compat.lightning.accelerators import Accelerator

__all__ = ["Accelerator"]
