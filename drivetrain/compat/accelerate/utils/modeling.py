"""Sizes and tensors of modules; what places a model over devices is absent."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names
from drivetrain.compat.accelerate.state import latest_accelerator
from drivetrain.compat.accelerate.utils.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from drivetrain.compat.accelerate.utils.imports import package_available
from drivetrain.runtime.errors import ConfigurationError

__getattr__ = absent_names(
    __name__,
    (
        BIG_MODELS,
        [
            "align_module_device",
            "calculate_maximum_sizes",
            "check_device_map",
            "check_tied_parameters_in_config",
            "check_tied_parameters_on_same_device",
            "clean_device_map",
            "get_balanced_memory",
            "get_max_layer_size",
            "get_max_memory",
            "get_state_dict_from_offload",
            "get_state_dict_offloaded_model",
            "infer_auto_device_map",
            "load_checkpoint_in_model",
            "load_offloaded_weights",
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


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Bytes of one element."""
    return 1 / 8 if dtype is torch.bool else torch.empty((), dtype=dtype).element_size()


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What two tensors have in common that share their memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model, or what a strategy has put one into, is peft's."""
    if not package_available("peft"):
        return False
    from peft import PeftModel

    from drivetrain.compat.accelerate.utils.other import extract_model_from_parallel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module by name.

    Args:
        module: The module.
        include_buffers: Whether buffers too.
        recurse: Whether those of modules within it too.
        remove_non_persistent: Leave out buffers that are not saved.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    saved = set(module.state_dict()) if remove_non_persistent else None
    for name, buffer in module.named_buffers(recurse=recurse):
        if saved is None or name in saved:
            yield name, buffer


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


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The names under which a parameter occurs more than once, a list for each such parameter."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Let each group of names hold one parameter again: the one among them that is not on the meta device."""
    for group in tied_params:
        found = [model.get_parameter(name) for name in group]
        kept = next((each for each in found if each.device.type != "meta"), found[0])
        for name in group:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, kept)


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: dict[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of each module with all that is in it, by name; that of the model under the empty name.

    Args:
        model: The model.
        dtype: Count floats as if they were of this dtype.
        special_dtypes: The same for single tensors, by name.
        buffers_only: Count buffers alone.
    """
    sizes: dict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        each = dtype_byte_size(tensor.dtype)
        if special_dtypes is not None and name in special_dtypes:
            each = dtype_byte_size(_dtype(special_dtypes[name]))
        elif dtype is not None and tensor.is_floating_point():
            each = min(each, dtype_byte_size(_dtype(dtype)))
        parts = name.split(".")
        for end in range(len(parts) + 1):
            sizes[".".join(parts[:end])] += int(tensor.numel() * each)
    return sizes


def _dtype(given: str | torch.dtype) -> torch.dtype:
    return getattr(torch, given.removeprefix("torch.")) if isinstance(given, str) else given


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether parameters are kept off the device by hooks; never here."""
    return False


def load_state_dict(checkpoint_file: str, device_map: Any = None) -> dict[str, torch.Tensor]:
    """Read a file of weights, safetensors or what `torch.save` wrote, without executing what is in it.

    Args:
        checkpoint_file: The file.
        device_map: One device for all; more are big-model inference.
    """
    device = next(iter(device_map.values())) if device_map else "cpu"
    if str(checkpoint_file).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(checkpoint_file, device=str(device))
    loaded: dict[str, torch.Tensor] = torch.load(checkpoint_file, map_location=device, weights_only=True)
    return loaded


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
