"""Number formats of models that are sharded."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import FSDPPrecision

__all__ = ["FSDPPrecision"]
