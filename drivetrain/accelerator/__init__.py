"""The `Accelerator` engine, which combines strategy, precision, data loading, checkpoints and trackers."""

from drivetrain.accelerator.accelerate_names import (
    AORecipeKwargs,
    AutocastKwargs,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TERecipeKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
)
from drivetrain.accelerator.accelerator import Accelerator
from drivetrain.accelerator.local_sgd import LocalSGD
from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.accelerator.preparation import AcceleratorState
from drivetrain.accelerator.prepared import GradientState, PreparedOptimizer, PreparedScheduler
from drivetrain.accelerator.step import WeightedMean

__all__ = [
    "AORecipeKwargs",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PreparedOptimizer",
    "PreparedScheduler",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "WeightedMean",
]
