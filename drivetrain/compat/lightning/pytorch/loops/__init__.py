"""Names of Lightning's loop classes, which drivetrain does not have."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.reasons import INTERNAL

_ABSENT = (
    "_EvaluationLoop",
    "_FitLoop",
    "_Loop",
    "_PredictionLoop",
    "_TrainingEpochLoop",
)

__getattr__ = absent_names(__name__, (INTERNAL, _ABSENT))
