"""Progress bars."""

from __future__ import annotations

from drivetrain.callbacks import TQDMProgressBar
from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import CALLBACK

__all__ = ["TQDMProgressBar"]

_ABSENT = ("ProgressBar", "RichProgressBar")

__getattr__ = absent_names(__name__, (CALLBACK, _ABSENT), room="drivetrain.callbacks")
