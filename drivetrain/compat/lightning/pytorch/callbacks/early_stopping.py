"""`EarlyStopping`."""

from __future__ import annotations

from drivetrain.callbacks import EarlyStopping

__all__ = ["EarlyStopping"]
