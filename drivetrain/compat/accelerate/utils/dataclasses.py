"""Option classes and enumerations under Accelerate's names."""

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
    """Base class of option classes, including those that scripts define."""

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of the options as a dict."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        default = vars(type(self)())
        return {name: value for name, value in self.to_dict().items() if default.get(name) != value}


class AORecipeKwargs(engine.AORecipeKwargs, KwargsHandler):
    """Options of torchao's fp8. See `drivetrain.accelerator.AORecipeKwargs`."""


class AutocastKwargs(engine.AutocastKwargs, KwargsHandler):
    """Options of autocast. See `drivetrain.accelerator.AutocastKwargs`."""


class DistributedDataParallelKwargs(engine.DistributedDataParallelKwargs, KwargsHandler):
    """Options of DDP. See `drivetrain.accelerator.DistributedDataParallelKwargs`."""


class FP8RecipeKwargs(engine.FP8RecipeKwargs, KwargsHandler):
    """Options of fp8 under Accelerate's older name. See `drivetrain.accelerator.FP8RecipeKwargs`."""


class GradientAccumulationPlugin(engine.GradientAccumulationPlugin, KwargsHandler):
    """Options of gradient accumulation. See `drivetrain.accelerator.GradientAccumulationPlugin`."""


class GradScalerKwargs(engine.GradScalerKwargs, KwargsHandler):
    """Options of the gradient scaler. See `drivetrain.accelerator.GradScalerKwargs`."""


class InitProcessGroupKwargs(engine.InitProcessGroupKwargs, KwargsHandler):
    """Options of the process group. See `drivetrain.accelerator.InitProcessGroupKwargs`."""


class MSAMPRecipeKwargs(engine.MSAMPRecipeKwargs, KwargsHandler):
    """Options of MS-AMP's fp8. See `drivetrain.accelerator.MSAMPRecipeKwargs`."""


class ProfileKwargs(engine.ProfileKwargs, KwargsHandler):
    """Options of the profiler. See `drivetrain.accelerator.ProfileKwargs`."""


@dataclass
class TorchDynamoPlugin(engine.TorchDynamoPlugin, KwargsHandler):
    """Options of `torch.compile`. Environment variables give the defaults."""

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

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as arguments of `torch.compile`."""
        defaults = {"backend": "no", "mode": "default", "fullgraph": False, "disable": False}
        given = self.to_dict()
        del given["use_regional_compilation"]
        return {name: value for name, value in given.items() if value != defaults.get(name)}


class TERecipeKwargs(engine.TERecipeKwargs, KwargsHandler):
    """Options of Transformer Engine's fp8. See `drivetrain.accelerator.TERecipeKwargs`."""


class _ContainsValues(enum.EnumMeta):
    def __contains__(cls, item: object) -> bool:
        members: dict[str, Any] = dict(cls.__members__)
        return isinstance(item, cls) or item in [member.value for member in members.values()]


class BaseEnum(enum.Enum, metaclass=_ContainsValues):
    """Enum whose members print as their values. `value in MyEnum` works for values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return the values of all members."""
        return [member.value for member in cls]


class SageMakerDistributedType(str, enum.Enum):
    """Parallelism of a SageMaker job. drivetrain cannot start SageMaker jobs."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(str, enum.Enum):
    """Environment that the run is launched in."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class FP8BackendType(str, enum.Enum):
    """Package that implements fp8."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class LoggerType(BaseEnum):
    """Names of the trackers."""

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
    """Values of `mixed_precision`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(BaseEnum):
    """Random generators that can be synchronized across processes."""

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
    """Low-precision number formats that have no torch dtype."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


@dataclass
class TorchTensorParallelPlugin:
    """Options of tensor parallelism from before `ParallelismConfig` existed."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of `ParallelismConfig(sp_handler=...)`."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


def get_module_class_from_name(module: nn.Module, name: str) -> type | None:
    """Return the class named `name` of a submodule, or None if there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)
