"""Errors, under the names of Lightning."""

from __future__ import annotations

from drivetrain.compat.lightning.fabric.utilities.exceptions import MisconfigurationException
from drivetrain.compat.lightning.signals import SIGTERMException

__all__ = ["MisconfigurationException", "SIGTERMException"]
