"""Checks for installed packages and available devices: Accelerate's `is_*_available`."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.runtime.devices import available_device_kinds, get_device_kind
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError

# function -> the package that it checks for
_PACKAGES = {
    "is_4bit_bnb_available": "bitsandbytes",
    "is_8bit_bnb_available": "bitsandbytes",
    "is_aim_available": "aim",
    "is_amdsmi_available": "amdsmi",
    "is_boto3_available": "boto3",
    "is_clearml_available": "clearml",
    "is_comet_ml_available": "comet_ml",
    "is_datasets_available": "datasets",
    "is_deepspeed_available": "deepspeed",
    "is_dvclive_available": "dvclive",
    "is_import_timer_available": "import_timer",
    "is_lomo_available": "lomo_optim",
    "is_matplotlib_available": "matplotlib",
    "is_megatron_lm_available": "megatron",
    "is_mlflow_available": "mlflow",
    "is_msamp_available": "msamp",
    "is_numpy_available": "numpy",
    "is_pandas_available": "pandas",
    "is_peft_available": "peft",
    "is_pynvml_available": "pynvml",
    "is_pytest_available": "pytest",
    "is_rich_available": "rich",
    "is_sagemaker_available": "sagemaker",
    "is_schedulefree_available": "schedulefree",
    "is_swanlab_available": "swanlab",
    "is_tensorboard_available": "tensorboard",
    "is_timm_available": "timm",
    "is_torchao_available": "torchao",
    "is_torchdata_available": "torchdata",
    "is_torchdata_stateful_dataloader_available": "torchdata.stateful_dataloader",
    "is_torchvision_available": "torchvision",
    "is_tqdm_available": "tqdm",
    "is_trackio_available": "trackio",
    "is_transformer_engine_available": "transformer_engine",
    "is_transformers_available": "transformers",
    "is_triton_available": "triton",
    "is_wandb_available": "wandb",
}

# function -> the device type that it checks for
_DEVICES = {
    "is_cuda_available": "cuda",
    "is_hpu_available": "hpu",
    "is_mlu_available": "mlu",
    "is_mps_available": "mps",
    "is_musa_available": "musa",
    "is_neuron_available": "neuron",
    "is_npu_available": "npu",
    "is_sdaa_available": "sdaa",
    "is_xpu_available": "xpu",
}


@functools.cache
def package_available(name: str) -> bool:
    """Return True if a package can be imported. The package itself is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def device_available(name: str) -> bool:
    """Return True if a device of this type is available. Imports its package if it is installed."""
    try:
        get_device_kind(name)
    except (ConfigurationError, DeviceNotAvailableError):
        return False
    return True


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return _asking(name, package_available, _PACKAGES[name])
    if name in _DEVICES:
        return _asking(name, device_available, _DEVICES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_DEVICES})


@functools.cache
def _asking(name: str, question: Callable[[str], bool], about: str) -> Callable[..., bool]:
    def ask(*args: Any, **kwargs: Any) -> bool:
        return question(about)

    ask.__name__ = ask.__qualname__ = name
    return ask


def is_torch_distributed_available() -> bool:
    """Return True if torch was built with `torch.distributed`."""
    return package_available("torch.distributed")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return True if the device supports bfloat16."""
    return bool(torch.get_device_module("cuda").is_bf16_supported()) if device_available("cuda") else True


def is_fp16_available() -> bool:
    """Return True if a device other than the CPU is available, since float16 is slow on CPUs."""
    return any(kind.name != "cpu" for kind in available_device_kinds())


def is_fp8_available() -> bool:
    """Return True if torchao, Transformer Engine or MS-AMP is installed."""
    return any(package_available(name) for name in ("torchao", "transformer_engine", "msamp"))


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return True if bitsandbytes is installed, in `min_version` or newer."""
    if not package_available("bitsandbytes"):
        return False
    if min_version is None:
        return True
    from drivetrain.compat.accelerate.utils.versions import compare_versions

    return compare_versions("bitsandbytes", ">=", min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return True if the installed bitsandbytes supports devices other than CUDA."""
    return is_bnb_available("0.46")


def is_rocm_available() -> bool:
    """Return True if torch was built for ROCm and a device is available."""
    return getattr(torch.version, "hip", None) is not None and device_available("cuda")


def is_xccl_available() -> bool:
    """Return True if an Intel XPU is available for the XCCL backend."""
    return device_available("xpu")


def is_habana_gaudi1() -> bool:
    """Return False always: first-generation Gaudi devices are not supported."""
    return False


def is_pippy_available() -> bool:
    """Return True always: torch includes pipeline parallelism."""
    return True


def is_weights_only_available() -> bool:
    """Return True always: torch supports `weights_only` loading."""
    return True


def is_transformer_engine_mxfp8_available() -> bool:
    """Return True if Transformer Engine and a GPU with MXFP8 (compute capability 10) are available."""
    return (
        package_available("transformer_engine")
        and device_available("cuda")
        and torch.get_device_module("cuda").get_device_capability() >= (10, 0)
    )


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return True if torch_xla is installed and, with `check_is_tpu`, an XLA device is available."""
    if not package_available("torch_xla"):
        return False
    if check_is_gpu:
        return False
    return device_available("xla") if check_is_tpu else True


def deepspeed_required(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to raise an error with the install command if DeepSpeed is missing."""
    return _required(function, "deepspeed", 'pip install "drivetrain[deepspeed]"')


def torchao_required(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to raise an error with the install command if torchao is missing."""
    return _required(function, "torchao", 'pip install "drivetrain[fp8]"')


def _required(function: Callable[..., Any], package: str, install: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not package_available(package):
            raise ImportError(f"{function.__name__} needs {package}: {install}")
        return function(*args, **kwargs)

    return checked
