"""`Tuner`."""

from __future__ import annotations

from drivetrain.trainer.tuning.tuner import Tuner

__all__ = ["Tuner"]
