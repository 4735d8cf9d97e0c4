"""Option holders and enumerations under Accelerate's names."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from drivetrain.accelerator import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    ProjectConfiguration,
    TERecipeKwargs,
)
from drivetrain.accelerator import DistributedDataParallelKwargs as EngineDDPKwargs
from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names
from drivetrain.compat.accelerate.utils.deepspeed_plugin import DeepSpeedPlugin
from drivetrain.compat.accelerate.utils.fsdp_plugin import FullyShardedDataParallelPlugin
from drivetrain.data import DataLoaderConfiguration
from drivetrain.runtime.nested import TensorInformation

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
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

__getattr__ = absent_names(__name__, (BIG_MODELS, ["BnbQuantizationConfig"]))


class KwargsHandler:
    """Base of option holders that a script defines itself."""

    def to_dict(self) -> dict[str, Any]:
        """The options by name."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        default = vars(type(self)())
        return {name: value for name, value in self.to_dict().items() if default.get(name) != value}


class _ContainsValues(enum.EnumMeta):
    def __contains__(cls, item: object) -> bool:
        return isinstance(item, cls) or item in [member.value for member in cls]  # type: ignore[attr-defined]


class BaseEnum(enum.Enum, metaclass=_ContainsValues):
    """An enumeration whose members print as their values, and that contains those values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """The values."""
        return [member.value for member in cls]


class DistributedType(str, enum.Enum):
    """How the processes of a run are spread."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    TP = "TP"


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


class DynamoBackend(str, BaseEnum):
    """Back ends of `torch.compile`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


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


class DDPCommunicationHookType(BaseEnum):
    """How DDP compresses gradients on the wire."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(EngineDDPKwargs, KwargsHandler):
    """`drivetrain.DistributedDataParallelKwargs`, whose hooks may also be members of `DDPCommunicationHookType`.

    Attributes:
        dim: Accepted; torch ignores it.
        check_reduction: Accepted; torch ignores it.
        comm_wrapper: Compresses what `comm_hook` sends.
    """

    dim: int = 0
    check_reduction: bool = False
    comm_wrapper: Any = DDPCommunicationHookType.NO

    def __post_init__(self) -> None:
        self.comm_hook = getattr(self.comm_hook, "value", self.comm_hook)
        self.comm_wrapper = getattr(self.comm_wrapper, "value", self.comm_wrapper)
        self.comm_state_option = self.comm_state_option or None


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile`.

    Attributes:
        backend: A back end's name, or None for no compilation.
        use_regional_compilation: Compile repeated blocks alone.
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        self.backend = DynamoBackend(str(getattr(self.backend, "value", self.backend) or "no").upper())

    def to_dict(self) -> dict[str, Any]:
        """The options of `torch.compile` by name, the back end in lower case."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}


@dataclass
class TorchTensorParallelPlugin:
    """Options of tensor parallelism, before `ParallelismConfig` had them."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchTensorParallelConfig:
    """Options of `ParallelismConfig(tp_handler=...)`."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of `ParallelismConfig(cp_handler=...)`."""

    cp_comm_strategy: Literal["allgather", "alltoall"] | None = None


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of `ParallelismConfig(sp_handler=...)`."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


def get_module_class_from_name(module: nn.Module, name: str) -> type | None:
    """The class of this name among those of a module and what is in it; None if there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)
