"""Number formats of models that DeepSpeed trains."""

from __future__ import annotations

from drivetrain.compat.lightning.plugins import DeepSpeedPrecision

__all__ = ["DeepSpeedPrecision"]
