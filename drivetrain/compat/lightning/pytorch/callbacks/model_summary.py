"""`ModelSummary`."""

from __future__ import annotations

from drivetrain.callbacks import ModelSummary

__all__ = ["ModelSummary"]
