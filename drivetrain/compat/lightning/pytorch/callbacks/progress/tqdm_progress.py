"""`TQDMProgressBar`."""

from __future__ import annotations

from drivetrain.callbacks import TQDMProgressBar

__all__ = ["TQDMProgressBar"]
