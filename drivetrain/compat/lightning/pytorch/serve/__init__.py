"""Names of Lightning's model serving, which drivetrain does not have."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.reasons import SERVE

_ABSENT = ("ServableModule", "ServableModuleValidator")

__getattr__ = absent_names(__name__, (SERVE, _ABSENT))
