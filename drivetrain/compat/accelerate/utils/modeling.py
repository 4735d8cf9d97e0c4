"""Sizes and tensors of modules; what places a model over devices is absent."""

from __future__ import annotations

import contextlib
import re
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names
from drivetrain.compat.accelerate.state import latest_accelerator
from drivetrain.compat.accelerate.utils.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from drivetrain.compat.accelerate.utils.imports import package_available
from drivetrain.inference import calculate_maximum_sizes as calculate_maximum_sizes
from drivetrain.inference import check_tied_parameters_in_config as check_tied_parameters_in_config
from drivetrain.inference import compute_module_sizes as compute_module_sizes
from drivetrain.inference import dtype_byte_size as dtype_byte_size
from drivetrain.inference import find_tied_parameters as find_tied_parameters
from drivetrain.inference import get_max_layer_size as get_max_layer_size
from drivetrain.inference import id_tensor_storage as id_tensor_storage
from drivetrain.inference import load_checkpoint_in_model as load_checkpoint_in_model
from drivetrain.inference import load_offloaded_weights as load_offloaded_weights
from drivetrain.inference import load_state_dict as load_state_dict
from drivetrain.inference import named_module_tensors as named_module_tensors
from drivetrain.inference import retie_parameters as retie_parameters
from drivetrain.runtime.errors import ConfigurationError

__getattr__ = absent_names(
    __name__,
    (
        BIG_MODELS,
        [
            "align_module_device",
            "check_device_map",
            "check_tied_parameters_on_same_device",
            "clean_device_map",
            "get_balanced_memory",
            "get_max_memory",
            "get_state_dict_from_offload",
            "get_state_dict_offloaded_model",
            "infer_auto_device_map",
        ],
    ),
)

_UNITS = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes from a number or from text such as `"5GB"` or `"500MiB"`.

    Raises:
        ConfigurationError: It is no size.
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]I?B)\s*", size.upper())
    if match is None:
        raise ConfigurationError(f"{size!r} is no size; give bytes, or text such as '5GB' or '500MiB'.")
    bits = size.rstrip().endswith("b")  # as Accelerate reads "5Gb"
    return int(float(match[1]) * _UNITS[match[2]]) // (8 if bits else 1)


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model, or what a strategy has put one into, is peft's."""
    if not package_available("peft"):
        return False
    from peft import PeftModel

    from drivetrain.compat.accelerate.utils.other import extract_model_from_parallel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that are not saved."""
    saved = set(module.state_dict())
    names = {name for name, _ in module.named_buffers(recurse=recurse) if name not in saved}
    return names if fqns else {name.rpartition(".")[2] for name in names}


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: torch.device | str | int,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> None:
    """Put a parameter or buffer on a device, with another value if one is given.

    Args:
        module: The module.
        tensor_name: Its name in it.
        device: The device.
        value: The value; its own if None.
        dtype: The dtype, where it is of floats; the value's if None.
        **options: Accepted; nothing is quantised or shared here.

    Raises:
        ConfigurationError: It has no value of its own, or the value has another shape.
    """
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    old = getattr(owner, name)
    if value is None and old.device.type == "meta" and torch.device(device).type != "meta":
        raise ConfigurationError(f"{tensor_name} is on the meta device and has no value; give value=...")
    if value is not None and value.shape != old.shape:
        raise ConfigurationError(
            f"{tensor_name} has the shape {tuple(old.shape)}, but the value {tuple(value.shape)}; give one alike."
        )
    new = (old if value is None else value).detach().to(device)
    if dtype is not None and new.is_floating_point():
        new = new.to(_dtype(dtype))
    if name in owner._parameters:
        owner._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        owner._buffers[name] = new


def _dtype(given: str | torch.dtype) -> torch.dtype:
    return getattr(torch, given.removeprefix("torch.")) if isinstance(given, str) else given


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether parameters are kept off the device by hooks; never here."""
    return False


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """The precision's context of the Accelerator that was made last.

    Args:
        native_amp: Whether to compute in the precision at all.
        autocast_kwargs: Options of this context.
    """
    accelerator = latest_accelerator()
    if accelerator is None or not native_amp:
        return contextlib.nullcontext()
    return accelerator.autocast(autocast_kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A loss scaler for the device of this process."""
    accelerator = latest_accelerator()
    device = "cpu" if accelerator is None else accelerator.device.type
    return torch.amp.GradScaler(device, **kwargs)
