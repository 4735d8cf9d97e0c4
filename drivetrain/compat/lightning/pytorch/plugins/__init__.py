"""Plugins: number formats are here, what replaces machinery is not."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
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
    "ClusterEnvironment",
    "LayerSync",
    "TorchCheckpointIO",
    "TransformerEnginePrecision",
    "XLACheckpointIO",
    "XLAPrecision",
)

__getattr__ = absent_names(__name__, (PLUGIN, _ABSENT))
