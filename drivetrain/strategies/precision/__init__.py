"""Numeric precisions, derived from `base.Precision`."""

from drivetrain.strategies.precision.base import Precision, overrides
from drivetrain.strategies.precision.fp8 import FP8
from drivetrain.strategies.precision.mixed import BFloat16Mixed, Float16Mixed
from drivetrain.strategies.precision.registry import (
    available_precisions,
    register_precision,
    resolve_precision,
)
from drivetrain.strategies.precision.true import BFloat16True, Double, Float16True

__all__ = [
    "FP8",
    "BFloat16Mixed",
    "BFloat16True",
    "Double",
    "Float16Mixed",
    "Float16True",
    "Precision",
    "available_precisions",
    "overrides",
    "register_precision",
    "resolve_precision",
]
