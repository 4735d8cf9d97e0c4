"""`EarlyStopping`, and why it stops."""

from __future__ import annotations

from drivetrain.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason

__all__ = ["EarlyStopping", "EarlyStoppingReason"]
