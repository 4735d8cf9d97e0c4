"""What a learning-rate search returns."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import TUNER
from drivetrain.trainer.tuning.lr_search import LRFinder as _LRFinder

__all__ = ["_LRFinder"]

__getattr__ = absent_names(__name__, (TUNER, ("lr_find",)))
