"""Warning categories."""

from __future__ import annotations

from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning

__all__ = ["PossibleUserWarning"]
