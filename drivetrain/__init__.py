"""Training of PyTorch models with a `Trainer`, or with an `Accelerator` in a loop of one's own.

Public names are imported on first use. `import drivetrain` alone does not import torch, which keeps the command line
fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export, public_names

__version__ = "0.1.0"

# public name -> the module that defines it
_EXPORTS: dict[str, str] = {
    "Accelerator": "drivetrain.accelerator",
    "AutocastKwargs": "drivetrain.accelerator",
    "DeepSpeedPlugin": "drivetrain.accelerator",
    "DistributedDataParallelKwargs": "drivetrain.accelerator",
    "FullyShardedDataParallelPlugin": "drivetrain.accelerator",
    "MegatronLMPlugin": "drivetrain.accelerator",
    "ParallelismConfig": "drivetrain.accelerator",
    "GradScalerKwargs": "drivetrain.accelerator",
    "GradientAccumulationPlugin": "drivetrain.accelerator",
    "AORecipeKwargs": "drivetrain.accelerator",
    "FP8RecipeKwargs": "drivetrain.accelerator",
    "MSAMPRecipeKwargs": "drivetrain.accelerator",
    "TERecipeKwargs": "drivetrain.accelerator",
    "InitProcessGroupKwargs": "drivetrain.accelerator",
    "ProjectConfiguration": "drivetrain.accelerator",
    "LocalSGD": "drivetrain.accelerator",
    "AcceleratorState": "drivetrain.accelerator",
    "GradientState": "drivetrain.accelerator",
    "DDPCommunicationHookType": "drivetrain.accelerator",
    "DynamoBackend": "drivetrain.accelerator",
    "ProfileKwargs": "drivetrain.accelerator",
    "TorchDynamoPlugin": "drivetrain.accelerator",
    "TorchContextParallelConfig": "drivetrain.accelerator",
    "Trainer": "drivetrain.trainer",
    "Task": "drivetrain.trainer",
    "MegatronTask": "drivetrain.trainer",
    "DataModule": "drivetrain.trainer",
    "TrainerCLI": "drivetrain.trainer.cli",
    "TrainerArgumentParser": "drivetrain.trainer.cli",
    "SaveConfigCallback": "drivetrain.trainer.cli",
    "AdvancedProfiler": "drivetrain.trainer.profilers",
    "PassThroughProfiler": "drivetrain.trainer.profilers",
    "Profiler": "drivetrain.trainer.profilers",
    "PyTorchProfiler": "drivetrain.trainer.profilers",
    "SimpleProfiler": "drivetrain.trainer.profilers",
    "XLAProfiler": "drivetrain.trainer.profilers",
    "Callback": "drivetrain.callbacks",
    "EarlyStopping": "drivetrain.callbacks",
    "EvaluationGather": "drivetrain.callbacks",
    "LearningRateMonitor": "drivetrain.callbacks",
    "LossSpikeGuard": "drivetrain.callbacks",
    "ModelCheckpoint": "drivetrain.callbacks",
    "ModelSummary": "drivetrain.callbacks",
    "NaNGuard": "drivetrain.callbacks",
    "Timer": "drivetrain.callbacks",
    "Timing": "drivetrain.runtime.timing",
    "TQDMProgressBar": "drivetrain.callbacks",
    "RichModelSummary": "drivetrain.callbacks",
    "RichProgressBar": "drivetrain.callbacks",
    "RichProgressBarTheme": "drivetrain.callbacks.rich_progress_bar",
    "RunReport": "drivetrain.callbacks",
    "ModelPruning": "drivetrain.callbacks",
    "measure_flops": "drivetrain.callbacks.throughput_monitor",
    "GradientNorm": "drivetrain.callbacks",
    "MemoryMonitor": "drivetrain.callbacks",
    "StragglerMonitor": "drivetrain.callbacks",
    "WeightHistograms": "drivetrain.callbacks",
    "DeviceStatsMonitor": "drivetrain.callbacks",
    "SpeedMonitor": "drivetrain.callbacks",
    "ThroughputMonitor": "drivetrain.callbacks",
    "PredictionWriter": "drivetrain.callbacks",
    "BasePredictionWriter": "drivetrain.callbacks",
    "BackboneFinetuning": "drivetrain.callbacks",
    "BaseFinetuning": "drivetrain.callbacks",
    "StochasticWeightAveraging": "drivetrain.callbacks",
    "EMAWeightAveraging": "drivetrain.callbacks",
    "WeightAveraging": "drivetrain.callbacks",
    "OnExceptionCheckpoint": "drivetrain.callbacks",
    "GradientAccumulationScheduler": "drivetrain.callbacks",
    "LambdaCallback": "drivetrain.callbacks",
    "BatchSizeFinder": "drivetrain.callbacks",
    "LearningRateFinder": "drivetrain.callbacks",
    "LRFinder": "drivetrain.trainer.tuning.lr_search",
    "Tuner": "drivetrain.trainer.tuning.tuner",
    "Strategy": "drivetrain.strategies",
    "DDP": "drivetrain.strategies",
    "FSDP": "drivetrain.strategies.fsdp",
    "DeepSpeed": "drivetrain.strategies.deepspeed",
    "DummyOptim": "drivetrain.strategies.deepspeed",
    "DummyScheduler": "drivetrain.strategies.deepspeed",
    "Megatron": "drivetrain.strategies.megatron",
    "Parallel": "drivetrain.strategies.parallel",
    "Colwise": "drivetrain.strategies.parallel",
    "Rowwise": "drivetrain.strategies.parallel",
    "SequenceParallel": "drivetrain.strategies.parallel",
    "PrepareModuleInput": "drivetrain.strategies.parallel",
    "PrepareModuleOutput": "drivetrain.strategies.parallel",
    "PrepareModuleInputOutput": "drivetrain.strategies.parallel",
    "sequence_positions": "drivetrain.strategies.parallel",
    "XLA": "drivetrain.strategies.xla",
    "XLAFSDP": "drivetrain.strategies.xla",
    "Single": "drivetrain.strategies",
    "register_strategy": "drivetrain.strategies",
    "available_strategies": "drivetrain.strategies",
    "Precision": "drivetrain.strategies.precision",
    "FP8": "drivetrain.strategies.precision",
    "register_precision": "drivetrain.strategies.precision",
    "available_precisions": "drivetrain.strategies.precision",
    "CombinedLoader": "drivetrain.data",
    "DataLoaderConfiguration": "drivetrain.data",
    "DataShard": "drivetrain.data",
    "PermutationSampler": "drivetrain.data",
    "TailPolicy": "drivetrain.data",
    "skip_first_batches": "drivetrain.data",
    "consolidate": "drivetrain.checkpoint",
    "newest_checkpoint": "drivetrain.checkpoint",
    "import_checkpoint": "drivetrain.checkpoint",
    "Tracker": "drivetrain.trackers",
    "CSVLogger": "drivetrain.trackers",
    "TensorBoardLogger": "drivetrain.trackers",
    "CometLogger": "drivetrain.trackers",
    "ClearMLLogger": "drivetrain.trackers",
    "WandbLogger": "drivetrain.trackers",
    "MLFlowLogger": "drivetrain.trackers",
    "AimLogger": "drivetrain.trackers",
    "DVCLiveLogger": "drivetrain.trackers",
    "TrackioLogger": "drivetrain.trackers",
    "SwanLabLogger": "drivetrain.trackers",
    "GeneralTracker": "drivetrain.trackers",
    "register_tracker": "drivetrain.trackers",
    "notebook_launcher": "drivetrain.launch",
    "PartialState": "drivetrain.runtime.state",
    "WorkQueue": "drivetrain.runtime.work_queue",
    "DistributedType": "drivetrain.runtime.state",
    "ProcessEnvironment": "drivetrain.runtime.environment",
    "DeviceKind": "drivetrain.runtime.devices",
    "register_device": "drivetrain.runtime.devices",
    "Duration": "drivetrain.runtime.durations",
    "DrivetrainError": "drivetrain.runtime.errors",
    "gather": "drivetrain.runtime.collectives",
    "gather_object": "drivetrain.runtime.collectives",
    "reduce": "drivetrain.runtime.collectives",
    "broadcast": "drivetrain.runtime.collectives",
    "broadcast_object_list": "drivetrain.runtime.collectives",
    "pad_across_processes": "drivetrain.runtime.collectives",
    "concatenate": "drivetrain.runtime.pytrees",
    "find_batch_size": "drivetrain.runtime.pytrees",
    "recursively_apply": "drivetrain.runtime.pytrees",
    "send_to_device": "drivetrain.runtime.pytrees",
    "set_seed": "drivetrain.runtime.seeds",
    "find_executable_batch_size": "drivetrain.runtime.memory",
    "release_memory": "drivetrain.runtime.memory",
    "get_logger": "drivetrain.runtime.logging",
    "ConfigurationError": "drivetrain.runtime.errors",
    "DeviceNotAvailableError": "drivetrain.runtime.errors",
    "CollectiveError": "drivetrain.runtime.errors",
    "CheckpointError": "drivetrain.runtime.errors",
    "DrivetrainDeprecationWarning": "drivetrain.runtime.errors",
    "DataError": "drivetrain.runtime.errors",
    "LaunchError": "drivetrain.runtime.errors",
    **dict.fromkeys(public_names("drivetrain.inference"), "drivetrain.inference"),
    **dict.fromkeys(public_names("drivetrain.planning"), "drivetrain.planning"),
    **dict.fromkeys(public_names("drivetrain.verification"), "drivetrain.verification"),
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator as Accelerator
    from drivetrain.accelerator import AcceleratorState as AcceleratorState
    from drivetrain.accelerator import AORecipeKwargs as AORecipeKwargs
    from drivetrain.accelerator import AutocastKwargs as AutocastKwargs
    from drivetrain.accelerator import DDPCommunicationHookType as DDPCommunicationHookType
    from drivetrain.accelerator import DeepSpeedPlugin as DeepSpeedPlugin
    from drivetrain.accelerator import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from drivetrain.accelerator import DynamoBackend as DynamoBackend
    from drivetrain.accelerator import FP8RecipeKwargs as FP8RecipeKwargs
    from drivetrain.accelerator import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from drivetrain.accelerator import GradientAccumulationPlugin as GradientAccumulationPlugin
    from drivetrain.accelerator import GradientState as GradientState
    from drivetrain.accelerator import GradScalerKwargs as GradScalerKwargs
    from drivetrain.accelerator import InitProcessGroupKwargs as InitProcessGroupKwargs
    from drivetrain.accelerator import LocalSGD as LocalSGD
    from drivetrain.accelerator import MegatronLMPlugin as MegatronLMPlugin
    from drivetrain.accelerator import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from drivetrain.accelerator import ParallelismConfig as ParallelismConfig
    from drivetrain.accelerator import ProfileKwargs as ProfileKwargs
    from drivetrain.accelerator import ProjectConfiguration as ProjectConfiguration
    from drivetrain.accelerator import TERecipeKwargs as TERecipeKwargs
    from drivetrain.accelerator import TorchContextParallelConfig as TorchContextParallelConfig
    from drivetrain.accelerator import TorchDynamoPlugin as TorchDynamoPlugin
    from drivetrain.callbacks import BackboneFinetuning as BackboneFinetuning
    from drivetrain.callbacks import BaseFinetuning as BaseFinetuning
    from drivetrain.callbacks import BasePredictionWriter as BasePredictionWriter
    from drivetrain.callbacks import BatchSizeFinder as BatchSizeFinder
    from drivetrain.callbacks import Callback as Callback
    from drivetrain.callbacks import DeviceStatsMonitor as DeviceStatsMonitor
    from drivetrain.callbacks import EarlyStopping as EarlyStopping
    from drivetrain.callbacks import EMAWeightAveraging as EMAWeightAveraging
    from drivetrain.callbacks import EvaluationGather as EvaluationGather
    from drivetrain.callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
    from drivetrain.callbacks import GradientNorm as GradientNorm
    from drivetrain.callbacks import LambdaCallback as LambdaCallback
    from drivetrain.callbacks import LearningRateFinder as LearningRateFinder
    from drivetrain.callbacks import LearningRateMonitor as LearningRateMonitor
    from drivetrain.callbacks import LossSpikeGuard as LossSpikeGuard
    from drivetrain.callbacks import MemoryMonitor as MemoryMonitor
    from drivetrain.callbacks import ModelCheckpoint as ModelCheckpoint
    from drivetrain.callbacks import ModelPruning as ModelPruning
    from drivetrain.callbacks import ModelSummary as ModelSummary
    from drivetrain.callbacks import NaNGuard as NaNGuard
    from drivetrain.callbacks import OnExceptionCheckpoint as OnExceptionCheckpoint
    from drivetrain.callbacks import PredictionWriter as PredictionWriter
    from drivetrain.callbacks import RichModelSummary as RichModelSummary
    from drivetrain.callbacks import RichProgressBar as RichProgressBar
    from drivetrain.callbacks import RunReport as RunReport
    from drivetrain.callbacks import SpeedMonitor as SpeedMonitor
    from drivetrain.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from drivetrain.callbacks import StragglerMonitor as StragglerMonitor
    from drivetrain.callbacks import ThroughputMonitor as ThroughputMonitor
    from drivetrain.callbacks import Timer as Timer
    from drivetrain.callbacks import TQDMProgressBar as TQDMProgressBar
    from drivetrain.callbacks import WeightAveraging as WeightAveraging
    from drivetrain.callbacks import WeightHistograms as WeightHistograms
    from drivetrain.callbacks.rich_progress_bar import RichProgressBarTheme as RichProgressBarTheme
    from drivetrain.callbacks.throughput_monitor import measure_flops as measure_flops
    from drivetrain.checkpoint import consolidate as consolidate
    from drivetrain.checkpoint import import_checkpoint as import_checkpoint
    from drivetrain.checkpoint import newest_checkpoint as newest_checkpoint
    from drivetrain.data import CombinedLoader as CombinedLoader
    from drivetrain.data import DataLoaderConfiguration as DataLoaderConfiguration
    from drivetrain.data import DataShard as DataShard
    from drivetrain.data import PermutationSampler as PermutationSampler
    from drivetrain.data import TailPolicy as TailPolicy
    from drivetrain.data import skip_first_batches as skip_first_batches
    from drivetrain.inference import *  # noqa: F403
    from drivetrain.launch import notebook_launcher as notebook_launcher
    from drivetrain.planning import *  # noqa: F403
    from drivetrain.runtime.collectives import broadcast as broadcast
    from drivetrain.runtime.collectives import broadcast_object_list as broadcast_object_list
    from drivetrain.runtime.collectives import gather as gather
    from drivetrain.runtime.collectives import gather_object as gather_object
    from drivetrain.runtime.collectives import pad_across_processes as pad_across_processes
    from drivetrain.runtime.collectives import reduce as reduce
    from drivetrain.runtime.devices import DeviceKind as DeviceKind
    from drivetrain.runtime.devices import register_device as register_device
    from drivetrain.runtime.durations import Duration as Duration
    from drivetrain.runtime.environment import ProcessEnvironment as ProcessEnvironment
    from drivetrain.runtime.errors import CheckpointError as CheckpointError
    from drivetrain.runtime.errors import CollectiveError as CollectiveError
    from drivetrain.runtime.errors import ConfigurationError as ConfigurationError
    from drivetrain.runtime.errors import DataError as DataError
    from drivetrain.runtime.errors import DeviceNotAvailableError as DeviceNotAvailableError
    from drivetrain.runtime.errors import DrivetrainDeprecationWarning as DrivetrainDeprecationWarning
    from drivetrain.runtime.errors import DrivetrainError as DrivetrainError
    from drivetrain.runtime.errors import LaunchError as LaunchError
    from drivetrain.runtime.logging import get_logger as get_logger
    from drivetrain.runtime.memory import find_executable_batch_size as find_executable_batch_size
    from drivetrain.runtime.memory import release_memory as release_memory
    from drivetrain.runtime.pytrees import concatenate as concatenate
    from drivetrain.runtime.pytrees import find_batch_size as find_batch_size
    from drivetrain.runtime.pytrees import recursively_apply as recursively_apply
    from drivetrain.runtime.pytrees import send_to_device as send_to_device
    from drivetrain.runtime.seeds import set_seed as set_seed
    from drivetrain.runtime.state import DistributedType as DistributedType
    from drivetrain.runtime.state import PartialState as PartialState
    from drivetrain.runtime.timing import Timing as Timing
    from drivetrain.runtime.work_queue import WorkQueue as WorkQueue
    from drivetrain.strategies import DDP as DDP
    from drivetrain.strategies import Single as Single
    from drivetrain.strategies import Strategy as Strategy
    from drivetrain.strategies import available_strategies as available_strategies
    from drivetrain.strategies import register_strategy as register_strategy
    from drivetrain.strategies.deepspeed import DeepSpeed as DeepSpeed
    from drivetrain.strategies.deepspeed import DummyOptim as DummyOptim
    from drivetrain.strategies.deepspeed import DummyScheduler as DummyScheduler
    from drivetrain.strategies.fsdp import FSDP as FSDP
    from drivetrain.strategies.megatron import Megatron as Megatron
    from drivetrain.strategies.parallel import Colwise as Colwise
    from drivetrain.strategies.parallel import Parallel as Parallel
    from drivetrain.strategies.parallel import PrepareModuleInput as PrepareModuleInput
    from drivetrain.strategies.parallel import PrepareModuleInputOutput as PrepareModuleInputOutput
    from drivetrain.strategies.parallel import PrepareModuleOutput as PrepareModuleOutput
    from drivetrain.strategies.parallel import Rowwise as Rowwise
    from drivetrain.strategies.parallel import SequenceParallel as SequenceParallel
    from drivetrain.strategies.parallel import sequence_positions as sequence_positions
    from drivetrain.strategies.precision import FP8 as FP8
    from drivetrain.strategies.precision import Precision as Precision
    from drivetrain.strategies.precision import available_precisions as available_precisions
    from drivetrain.strategies.precision import register_precision as register_precision
    from drivetrain.strategies.xla import XLA as XLA
    from drivetrain.strategies.xla import XLAFSDP as XLAFSDP
    from drivetrain.trackers import AimLogger as AimLogger
    from drivetrain.trackers import ClearMLLogger as ClearMLLogger
    from drivetrain.trackers import CometLogger as CometLogger
    from drivetrain.trackers import CSVLogger as CSVLogger
    from drivetrain.trackers import DVCLiveLogger as DVCLiveLogger
    from drivetrain.trackers import GeneralTracker as GeneralTracker
    from drivetrain.trackers import MLFlowLogger as MLFlowLogger
    from drivetrain.trackers import SwanLabLogger as SwanLabLogger
    from drivetrain.trackers import TensorBoardLogger as TensorBoardLogger
    from drivetrain.trackers import Tracker as Tracker
    from drivetrain.trackers import TrackioLogger as TrackioLogger
    from drivetrain.trackers import WandbLogger as WandbLogger
    from drivetrain.trackers import register_tracker as register_tracker
    from drivetrain.trainer import DataModule as DataModule
    from drivetrain.trainer import MegatronTask as MegatronTask
    from drivetrain.trainer import Task as Task
    from drivetrain.trainer import Trainer as Trainer
    from drivetrain.trainer.cli import SaveConfigCallback as SaveConfigCallback
    from drivetrain.trainer.cli import TrainerArgumentParser as TrainerArgumentParser
    from drivetrain.trainer.cli import TrainerCLI as TrainerCLI
    from drivetrain.trainer.profilers import AdvancedProfiler as AdvancedProfiler
    from drivetrain.trainer.profilers import PassThroughProfiler as PassThroughProfiler
    from drivetrain.trainer.profilers import Profiler as Profiler
    from drivetrain.trainer.profilers import PyTorchProfiler as PyTorchProfiler
    from drivetrain.trainer.profilers import SimpleProfiler as SimpleProfiler
    from drivetrain.trainer.profilers import XLAProfiler as XLAProfiler
    from drivetrain.trainer.tuning.lr_search import LRFinder as LRFinder
    from drivetrain.trainer.tuning.tuner import Tuner as Tuner
    from drivetrain.verification import *  # noqa: F403
