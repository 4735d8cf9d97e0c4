"""Plugins: number formats are here, what replaces machinery is not."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment as ClusterEnvironment
from drivetrain.compat.lightning.plugins import DeepSpeedPrecision as DeepSpeedPrecision
from drivetrain.compat.lightning.plugins import DoublePrecision as DoublePrecision
from drivetrain.compat.lightning.plugins import FSDPPrecision as FSDPPrecision
from drivetrain.compat.lightning.plugins import HalfPrecision as HalfPrecision
from drivetrain.compat.lightning.plugins import MixedPrecision as MixedPrecision
from drivetrain.compat.lightning.plugins import Precision as Precision
from drivetrain.compat.lightning.reasons import PLUGIN

_ABSENT = (
    "BitsandbytesPrecision",
    "CheckpointIO",
    "TorchCheckpointIO",
    "TransformerEnginePrecision",
    "XLACheckpointIO",
    "XLAPrecision",
)

__getattr__ = absent_names(__name__, (PLUGIN, _ABSENT))
