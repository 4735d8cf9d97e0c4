"""Callbacks that are here once `drivetrain.callbacks` has them."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import CALLBACK

_ABSENT = ("BackboneFinetuning", "BaseFinetuning")

__getattr__ = absent_names(__name__, (CALLBACK, _ABSENT), room="drivetrain.callbacks")
