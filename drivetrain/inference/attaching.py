"""Adds hooks to the modules of a model that is placed over devices, or offloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.inference.aligning import AlignDevicesHook, Device, has_offloaded_params
from drivetrain.inference.hooks import add_hook_to_module, hook_of
from drivetrain.inference.offloaded import PrefixedDataset
from drivetrain.inference.sizes import named_module_tensors
from drivetrain.inference.tensors import TiedTensors, tied_tensors


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Have a module and all modules within it that hold tensors run on a device.

    Args:
        module: The module. Modules that have a hook keep it.
        execution_device: The device.
        skip_keys: Keys of keyword arguments whose values stay where they are.
        preload_module_classes: Names of classes whose modules are not entered.
        tied_params_map: See `set_module_tensor_to_device`.
    """
    if tied_params_map is None:
        tied_params_map = tied_tensors(module)
    if hook_of(module) is None and any(True for _ in named_module_tensors(module, recurse=True)):
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add an `AlignDevicesHook` to each module within a module that holds tensors itself, in addition to its hooks.

    Args:
        module: The module.
        execution_device: The device that the modules run on.
        offload: Keep their weights elsewhere, and bring them for the forward of each only.
        weights_map: The weights by their names in the model.
        offload_buffers: Whether buffers are offloaded too.
        module_name: The name of the module in the model.
        skip_keys: Keys of keyword arguments and outputs whose values stay where they are.
        preload_module_classes: Names of classes whose modules bring all weights within them at once, since they use
            the weights of a module within them without calling it.
        tied_params_map: See `set_module_tensor_to_device`.
    """
    if tied_params_map is None:
        tied_params_map = tied_tensors(module)
    whole = offload and type(module).__name__ in (preload_module_classes or ())
    holds = whole or any(True for _ in named_module_tensors(module))
    if holds and not (offload and has_offloaded_params(module)):  # a module that is used in two places is met twice
        of_module = weights_map
        if weights_map is not None and module_name:
            of_module = PrefixedDataset(weights_map, f"{module_name}.")
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=of_module,
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add an `AlignDevicesHook` to each of the blocks that a model is placed by.

    Args:
        module: The model.
        execution_device: The device that it runs on, or that of each block by name.
        offload: Whether weights are kept elsewhere, or for each block by name.
        weights_map: The weights of offloaded blocks by their names in the model.
        offload_buffers: Whether buffers are offloaded too.
        module_name: The name of the module in the model.
        skip_keys: Keys of keyword arguments and outputs whose values stay where they are.
        preload_module_classes: See `attach_align_device_hook`.
        tied_params_map: See `set_module_tensor_to_device`.
    """
    devices: Mapping[str, Any]
    if isinstance(execution_device, Mapping):
        devices = execution_device
        offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    elif isinstance(offload, Mapping):
        devices, offloads = dict.fromkeys(offload, execution_device), offload
    else:
        devices, offloads = {module_name: execution_device}, {module_name: offload}
    if tied_params_map is None:
        tied_params_map = tied_tensors(module)
    shared: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    placed = set[int]()
    for inner, block in module.named_modules(remove_duplicate=False):
        name, outermost = ".".join(filter(None, (module_name, inner))), not inner
        if name not in devices or name not in offloads or id(block) in placed:
            if outermost:
                add_hook_to_module(block, AlignDevicesHook(io_same_device=True, **shared), append=True)
            continue
        device = devices[name]
        placed.add(id(block))
        if offloads[name]:
            attach_align_device_hook(
                block,
                device,
                True,
                weights_map,
                offload_buffers,
                name,
                preload_module_classes=preload_module_classes,
                **shared,
            )
            if hook_of(block) is None:
                add_hook_to_module(block, AlignDevicesHook(device, io_same_device=outermost, **shared), append=True)
        else:
            hook = AlignDevicesHook(device, io_same_device=outermost, place_submodules=True, **shared)
            add_hook_to_module(block, hook, append=True)
        if device is not None and (isinstance(execution_device, Mapping) or isinstance(offload, Mapping)):
            attach_execution_device_hook(block, device, skip_keys, preload_module_classes, tied_params_map)
