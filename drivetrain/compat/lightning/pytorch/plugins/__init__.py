"""Plugins: number formats are here, what replaces machinery is not."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment
from drivetrain.compat.lightning.plugins import (
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TorchSyncBatchNorm,
)
from drivetrain.compat.lightning.reasons import PLUGIN

__all__ = [
    "ClusterEnvironment",
    "DeepSpeedPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TorchSyncBatchNorm",
]

_ABSENT = (
    "AsyncCheckpointIO",
    "BitsandbytesPrecision",
    "CheckpointIO",
    "LayerSync",
    "TorchCheckpointIO",
    "TransformerEnginePrecision",
    "XLACheckpointIO",
    "XLAPrecision",
)

__getattr__ = absent_names(__name__, (PLUGIN, _ABSENT))
