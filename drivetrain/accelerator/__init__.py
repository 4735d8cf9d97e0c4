"""The raw engine: composes strategy, precision, data, checkpoint and trackers."""

from drivetrain.accelerator.accelerator import Accelerator
from drivetrain.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.accelerator.optimizer import PreparedOptimizer
from drivetrain.accelerator.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from drivetrain.accelerator.scheduler import PreparedScheduler
from drivetrain.accelerator.weighted_mean import WeightedMean

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PreparedOptimizer",
    "PreparedScheduler",
    "ProjectConfiguration",
    "WeightedMean",
]
