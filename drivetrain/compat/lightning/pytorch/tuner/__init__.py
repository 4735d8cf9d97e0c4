"""`Tuner`."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.trainer.tuning.tuner import Tuner

__all__ = ["Tuner"]

__getattr__ = absent_names(__name__)
