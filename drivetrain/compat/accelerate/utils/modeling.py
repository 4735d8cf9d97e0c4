"""Sizes, tensors and device maps of modules. Loading and offloading of weights is not provided."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from drivetrain.compat.accelerate.absent import INTERNAL, absent_names
from drivetrain.compat.accelerate.state import latest_accelerator
from drivetrain.compat.accelerate.utils.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from drivetrain.compat.accelerate.utils.imports import package_available
from drivetrain.inference import align_module_device as align_module_device
from drivetrain.inference import calculate_maximum_sizes as calculate_maximum_sizes
from drivetrain.inference import check_device_map as check_device_map
from drivetrain.inference import check_tied_parameters_in_config as check_tied_parameters_in_config
from drivetrain.inference import check_tied_parameters_on_same_device as check_tied_parameters_on_same_device
from drivetrain.inference import clean_device_map as clean_device_map
from drivetrain.inference import compute_module_sizes as compute_module_sizes
from drivetrain.inference import dtype_byte_size as dtype_byte_size
from drivetrain.inference import find_tied_parameters as find_tied_parameters
from drivetrain.inference import get_balanced_memory as get_balanced_memory
from drivetrain.inference import get_max_layer_size as get_max_layer_size
from drivetrain.inference import get_max_memory as get_max_memory
from drivetrain.inference import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from drivetrain.inference import has_offloaded_params as has_offloaded_params
from drivetrain.inference import id_tensor_storage as id_tensor_storage
from drivetrain.inference import infer_auto_device_map as infer_auto_device_map
from drivetrain.inference import load_checkpoint_in_model as load_checkpoint_in_model
from drivetrain.inference import load_offloaded_weights as load_offloaded_weights
from drivetrain.inference import load_state_dict as load_state_dict
from drivetrain.inference import named_module_tensors as named_module_tensors
from drivetrain.inference import retie_parameters as retie_parameters
from drivetrain.inference import set_module_tensor_to_device as set_module_tensor_to_device
from drivetrain.runtime.host import parse_bytes

__getattr__ = absent_names(
    __name__,
    (
        INTERNAL,
        [
            "get_state_dict_from_offload",
        ],
    ),
)
convert_file_size_to_int = parse_bytes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: dict[str, str | torch.dtype] | None = None,
) -> int:
    """Return the size of all buffers in bytes. See `drivetrain.inference.compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def is_peft_model(model: nn.Module) -> bool:
    """Return True if a model, once unwrapped, is a `PeftModel`."""
    if not package_available("peft"):
        return False
    from peft import PeftModel

    from drivetrain.compat.accelerate.utils.other import extract_model_from_parallel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the non-persistent buffers, which a state dict omits."""
    saved = set(module.state_dict())
    names = {name for name, _ in module.named_buffers(recurse=recurse) if name not in saved}
    return names if fqns else {name.rpartition(".")[2] for name in names}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return the autocast context manager of the Accelerator that was created last."""
    accelerator = latest_accelerator()
    if accelerator is None or not native_amp:
        return contextlib.nullcontext()
    return accelerator.autocast(autocast_kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Create a gradient scaler for this process's device."""
    accelerator = latest_accelerator()
    device = "cpu" if accelerator is None else accelerator.device.type
    return torch.amp.GradScaler(device, **kwargs)
