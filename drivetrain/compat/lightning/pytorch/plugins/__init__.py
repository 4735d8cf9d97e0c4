"""Plugins for precision, cluster environments and checkpoint IO, without those that replace Lightning's internals."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
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
from drivetrain.compat.lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from drivetrain.compat.lightning.reasons import PLUGIN, XLA_FILES

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointIO",
    "ClusterEnvironment",
    "DeepSpeedPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TorchCheckpointIO",
    "TorchSyncBatchNorm",
]

_ABSENT = (
    "BitsandbytesPrecision",
    "LayerSync",
    "TransformerEnginePrecision",
    "XLAPrecision",
)

__getattr__ = absent_names(__name__, (PLUGIN, _ABSENT), (XLA_FILES, ("XLACheckpointIO",)))
