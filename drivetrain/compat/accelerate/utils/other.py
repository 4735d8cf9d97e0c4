"""Saving, unwrapping, compiling, and the rest of Accelerate's helpers."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from drivetrain.compat.accelerate.state import PartialState, latest_accelerator
from drivetrain.compat.accelerate.utils.environment import check_os_kernel, clear_environment, patch_environment

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "clear_environment",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "patch_environment",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
    "write_basic_config",
]

logger = logging.getLogger("accelerate.utils.other")


def wait_for_everyone() -> None:
    """Block until all processes reach this call."""
    PartialState().wait_for_everyone()


def is_compiled_module(module: nn.Module) -> bool:
    """Return True if the module is the result of `torch.compile`."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return True if a submodule is compiled."""
    return any(is_compiled_module(part) for part in module.modules() if part is not module)


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile each block of a list of equal blocks. Compiles the whole module if there is no such list."""
    repeated = [
        part
        for part in module.modules()
        if isinstance(part, nn.ModuleList) and len(part) > 1 and len({type(block) for block in part}) == 1
    ]
    if not repeated:
        return torch.compile(module, **compile_kwargs)  # type: ignore[return-value]
    for blocks in repeated:
        for block in blocks:
            block.compile(**compile_kwargs)
    return module


compile_regions_deepspeed = compile_regions
compile_regions_fsdp2 = compile_regions


def model_has_dtensor(model: nn.Module) -> bool:
    """Return True if a parameter is a DTensor."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the tensor-parallel size that transformers used for the model, or None."""
    return getattr(model, "tp_size", None)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's module without the wrappers of the strategy."""
    accelerator = latest_accelerator()
    if accelerator is not None:
        return accelerator.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
    return without_wrappers(model, keep_fp32_wrapper, keep_torch_compile)


# `Strategy.unwrap` removes the strategy's own wrappers. The script may have added these itself.
_ADDED_BY_SCRIPTS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def without_wrappers(model: nn.Module, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
    """Remove torch's data-parallel wrappers from a module. A compiled module may stay compiled.

    Without `keep_fp32_wrapper`, the forward method that the script stored in `_original_forward` is restored.
    """
    bare: Any = model
    compiled: Any = None
    while is_compiled_module(bare) or isinstance(bare, _ADDED_BY_SCRIPTS):
        if is_compiled_module(bare):
            compiled = bare if compiled is None else compiled
            bare = bare._orig_mod
        else:
            bare = bare.module
    original = None if keep_fp32_wrapper else vars(bare).pop("_original_forward", None)
    if original is not None:
        vars(bare).pop("forward", None)
        if bare.forward != original:
            bare.forward = original
    if compiled is not None and keep_torch_compile:
        bare = compiled if compiled._orig_mod is bare else type(compiled)(bare, compiled.dynamo_ctx)
    found: nn.Module = bare
    return found


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict without shared storages, with contiguous tensors, as safetensors requires."""
    seen: set[tuple[torch.device, int, torch.Size]] = set()
    kept: dict[str, torch.Tensor] = {}
    shared: list[str] = []
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor):
            key = (tensor.device, tensor.data_ptr(), tensor.shape)
            if tensor.nelement() and key in seen:
                shared.append(name)
                continue
            seen.add(key)
            tensor = tensor.contiguous()
        kept[name] = tensor
    if shared:
        logger.warning(f"Removed shared tensor name(s) {shared}: each tensor is saved once, under its first name.")
    return kept


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object to a file on the main process."""
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if safe_serialization:
        from safetensors.torch import save_file

        save_file(clean_state_dict_for_safetensors(obj), f, metadata={"format": "pt"})
    else:
        torch.save(obj, f)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load a file that `torch.save` wrote, by default with `weights_only=True`."""
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of an object or of its class."""
    for owner in (obj, type(obj)):
        for attribute in ("__qualname__", "__name__"):
            name = getattr(owner, attribute, None)
            if name:
                return str(name)
    return str(obj)


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Merge a nested dict into another one, and return the latter."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return True if a process listens on a port of this machine, 29500 by default."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", int(port or 29500))) == 0


def get_free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def convert_bytes(size: float) -> str:
    """Format a number of bytes in the largest unit that fits."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} TB"


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its dotted path, such as `"model.layers.0"`."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all submodules so that children come before their parents."""
    named = [(name, module) for name, module in model.named_modules()]
    named.sort(key=lambda each: -len(re.findall(r"\.", each[0])) - bool(each[0]))
    return named if return_fqns else [module for _, module in named]


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Any:
    """Write a configuration file for this machine, as `accelerate config default` does."""
    from drivetrain.compat.accelerate.commands.config.default import write_basic_config as write

    return write(mixed_precision, save_location)
