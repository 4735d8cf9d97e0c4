"""Batch-size searches, which are a method of `Tuner`."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import TUNER

_ABSENT = ("scale_batch_size",)

__getattr__ = absent_names(__name__, (TUNER, _ABSENT))
