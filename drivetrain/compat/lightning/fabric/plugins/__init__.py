"""Plugins for precision, cluster environments and checkpoint IO, without those that replace Lightning's internals."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.checkpoint_io import CheckpointIO as CheckpointIO
from drivetrain.compat.lightning.checkpoint_io import TorchCheckpointIO as TorchCheckpointIO
from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment as ClusterEnvironment
from drivetrain.compat.lightning.plugins import DeepSpeedPrecision as DeepSpeedPrecision
from drivetrain.compat.lightning.plugins import DoublePrecision as DoublePrecision
from drivetrain.compat.lightning.plugins import FSDPPrecision as FSDPPrecision
from drivetrain.compat.lightning.plugins import HalfPrecision as HalfPrecision
from drivetrain.compat.lightning.plugins import MixedPrecision as MixedPrecision
from drivetrain.compat.lightning.plugins import Precision as Precision
from drivetrain.compat.lightning.reasons import PLUGIN, XLA_FILES

_ABSENT = (
    "BitsandbytesPrecision",
    "TransformerEnginePrecision",
    "XLAPrecision",
)

__getattr__ = absent_names(__name__, (PLUGIN, _ABSENT), (XLA_FILES, ("XLACheckpointIO",)))
