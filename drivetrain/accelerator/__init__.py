"""The raw engine: composes strategy, precision, data, checkpoint and trackers."""

from drivetrain.accelerator.accelerator import Accelerator
from drivetrain.accelerator.dynamo_plugin import DynamoBackend, TorchDynamoPlugin
from drivetrain.accelerator.engine_state import AcceleratorState
from drivetrain.accelerator.fp8_handlers import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from drivetrain.accelerator.gradient_state import GradientState
from drivetrain.accelerator.handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from drivetrain.accelerator.local_sgd import LocalSGD
from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.accelerator.optimizer import PreparedOptimizer
from drivetrain.accelerator.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from drivetrain.accelerator.scheduler import PreparedScheduler
from drivetrain.accelerator.weighted_mean import WeightedMean

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
