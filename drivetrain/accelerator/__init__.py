"""The raw engine: composes strategy, precision, data, checkpoint and trackers."""

from drivetrain.accelerator.accelerator import Accelerator
from drivetrain.accelerator.fp8_handlers import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
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
    "AORecipeKwargs",
    "Accelerator",
    "AutocastKwargs",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PreparedOptimizer",
    "PreparedScheduler",
    "ProjectConfiguration",
    "TERecipeKwargs",
    "WeightedMean",
]
