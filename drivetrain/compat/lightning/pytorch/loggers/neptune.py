"""A logger that is not here."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import LOGGER

_ABSENT = ("NeptuneLogger",)

__getattr__ = absent_names(__name__, (LOGGER, _ABSENT))
