"""The tuner, which is not here yet."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import TUNER

_ABSENT = ("Tuner",)

__getattr__ = absent_names(__name__, (TUNER, _ABSENT))
