"""Summaries of modules."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.pytorch.utilities.model_summary.model_summary import (
    LayerSummary,
    ModelSummary,
    summarize,
)
from drivetrain.compat.lightning.reasons import INTERNAL

__all__ = ["LayerSummary", "ModelSummary", "summarize"]

__getattr__ = absent_names(__name__, (INTERNAL, ("DeepSpeedSummary",)))
