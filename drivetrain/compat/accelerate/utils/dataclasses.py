"""Option holders and enumerations under Accelerate's names."""

from __future__ import annotations

import copy
import enum
import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain import accelerator as engine
from drivetrain.accelerator import (
    DDPCommunicationHookType,
    DynamoBackend,
    MegatronLMPlugin,
    ProjectConfiguration,
)
from drivetrain.compat.accelerate.parallelism_config import (
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from drivetrain.compat.accelerate.utils.deepspeed_plugin import DeepSpeedPlugin
from drivetrain.compat.accelerate.utils.environment import str_to_bool
from drivetrain.compat.accelerate.utils.fsdp_plugin import FullyShardedDataParallelPlugin
from drivetrain.data import DataLoaderConfiguration
from drivetrain.inference import BnbQuantizationConfig
from drivetrain.runtime.pytrees import TensorInformation
from drivetrain.runtime.state import DistributedType

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "BaseEnum",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "get_module_class_from_name",
]


class KwargsHandler:
    """Base of option holders, also of those that a script defines itself."""

    def to_dict(self) -> dict[str, Any]:
        """The options by name."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        default = vars(type(self)())
        return {name: value for name, value in self.to_dict().items() if default.get(name) != value}


class AORecipeKwargs(engine.AORecipeKwargs, KwargsHandler):
    """Options of torchao's fp8; see `drivetrain.accelerator.AORecipeKwargs`."""


class AutocastKwargs(engine.AutocastKwargs, KwargsHandler):
    """Options of autocast; see `drivetrain.accelerator.AutocastKwargs`."""


class DistributedDataParallelKwargs(engine.DistributedDataParallelKwargs, KwargsHandler):
    """Options of DDP; see `drivetrain.accelerator.DistributedDataParallelKwargs`."""


class FP8RecipeKwargs(engine.FP8RecipeKwargs, KwargsHandler):
    """Options of fp8 under Accelerate's older name; see `drivetrain.accelerator.FP8RecipeKwargs`."""


class GradientAccumulationPlugin(engine.GradientAccumulationPlugin, KwargsHandler):
    """How gradients accumulate; see `drivetrain.accelerator.GradientAccumulationPlugin`."""


class GradScalerKwargs(engine.GradScalerKwargs, KwargsHandler):
    """Options of the loss scale; see `drivetrain.accelerator.GradScalerKwargs`."""


class InitProcessGroupKwargs(engine.InitProcessGroupKwargs, KwargsHandler):
    """Options of the process group; see `drivetrain.accelerator.InitProcessGroupKwargs`."""


class MSAMPRecipeKwargs(engine.MSAMPRecipeKwargs, KwargsHandler):
    """Options of MS-AMP's fp8; see `drivetrain.accelerator.MSAMPRecipeKwargs`."""


class ProfileKwargs(engine.ProfileKwargs, KwargsHandler):
    """Options of the profiler; see `drivetrain.accelerator.ProfileKwargs`."""


@dataclass
class TorchDynamoPlugin(engine.TorchDynamoPlugin, KwargsHandler):
    """Options of `torch.compile`, from the environment where they are not given."""

    def __post_init__(self) -> None:
        self.backend = self.backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
        self.mode = self.mode or os.environ.get("ACCELERATE_DYNAMO_MODE", "default")
        words = (
            ("fullgraph", "USE_FULLGRAPH"),
            ("dynamic", "USE_DYNAMIC"),
            ("use_regional_compilation", "USE_REGIONAL_COMPILATION"),
        )
        for name, word in words:
            if getattr(self, name) is None:
                value = os.environ.get(f"ACCELERATE_DYNAMO_{word}")
                unset = None if name == "dynamic" else False
                setattr(self, name, unset if value is None else str_to_bool(value, to_bool=True))
        super().__post_init__()


class TERecipeKwargs(engine.TERecipeKwargs, KwargsHandler):
    """Options of Transformer Engine's fp8; see `drivetrain.accelerator.TERecipeKwargs`."""


class _ContainsValues(enum.EnumMeta):
    def __contains__(cls, item: object) -> bool:
        members: dict[str, Any] = dict(cls.__members__)
        return isinstance(item, cls) or item in [member.value for member in members.values()]


class BaseEnum(enum.Enum, metaclass=_ContainsValues):
    """An enumeration whose members print as their values, and that contains those values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """The values."""
        return [member.value for member in cls]


class SageMakerDistributedType(str, enum.Enum):
    """How a SageMaker job is spread; none is started from here."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(str, enum.Enum):
    """Where a run is."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class FP8BackendType(str, enum.Enum):
    """Which package computes in fp8."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class LoggerType(BaseEnum):
    """Names of trackers."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(str, BaseEnum):
    """Names of precisions."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(BaseEnum):
    """Random generators by what draws from them."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class CustomDtype(enum.Enum):
    """Number formats that torch has no dtype for."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


@dataclass
class TorchTensorParallelPlugin:
    """Options of tensor parallelism, before `ParallelismConfig` had them."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of `ParallelismConfig(sp_handler=...)`."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


def get_module_class_from_name(module: nn.Module, name: str) -> type | None:
    """The class of this name among those of a module and what is in it; None if there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)
