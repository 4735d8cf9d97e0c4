"""Training in float8, with one backend per file, derived from `base.FP8Backend`."""

from drivetrain.strategies.precision.fp8.base import FP8Backend
from drivetrain.strategies.precision.fp8.msamp import MSAMP
from drivetrain.strategies.precision.fp8.precision import FP8
from drivetrain.strategies.precision.fp8.te import TransformerEngine
from drivetrain.strategies.precision.fp8.torchao import TorchAO

__all__ = ["FP8", "MSAMP", "FP8Backend", "TorchAO", "TransformerEngine"]
