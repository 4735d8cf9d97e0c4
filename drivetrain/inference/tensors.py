"""Operations on single parameters and buffers of a module: devices, dtypes and ties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.memory import wraps_others


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return an identifier of a tensor's memory, equal for tensors that share it.

    Args:
        tensor: The tensor. It may be on the meta device.

    Returns:
        The device, a number that is unique during the storage's lifetime, and the storage's size in bytes.
    """
    if wraps_others(tensor):
        return tensor.device, id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    # All addresses on the meta device are 0.
    return tensor.device, storage.data_ptr() or storage._cdata, storage.nbytes()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    if wraps_others(tensor):
        return 0, tensor.numel() * tensor.element_size()
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * size, int(start + last + 1) * size


def find_tied_parameters(model: nn.Module, **_kwargs: Any) -> list[list[str]]:
    """Return groups of names of parameters that share a weight.

    Parameters are tied if they share memory, fully or partly. Parameters that a transformers model declares as tied
    count too, even if each currently has its own memory.

    Args:
        model: The model.

    Returns:
        A sorted list of names for each group of two or more.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [sorted(group) for group in memory_groups(parameters, declared_ties(model)) if len(group) > 1]


def memory_groups(tensors: Mapping[str, torch.Tensor], declared: Mapping[str, str]) -> list[list[str]]:
    groups = _DisjointNames(tensors)
    storages: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        storages[id_tensor_storage(tensor)[:2]].append((*extent(tensor), name))
    for covered in storages.values():
        first, reached = "", 0
        # Sweep by address: a tensor that starts before the last end overlaps an earlier one.
        for start, end, name in sorted(covered):
            if start < reached:
                groups.join(first, name)
            elif end > start:
                first = name
            reached = max(reached, end)
    for target, source in declared.items():
        if target in tensors and source in tensors:
            groups.join(source, target)
    return groups.all()


class _DisjointNames:
    def __init__(self, names: Iterable[str]) -> None:
        self._first = {name: name for name in names}

    def join(self, one: str, other: str) -> None:
        kept, joined = self._first[one], self._first[other]
        if kept == joined:
            return
        self._first = {name: kept if first == joined else first for name, first in self._first.items()}

    def all(self) -> list[list[str]]:
        groups: dict[str, list[str]] = defaultdict(list)
        for name, first in self._first.items():
            groups[first].append(name)
        return list(groups.values())


def declared_ties(model: nn.Module) -> Mapping[str, str]:
    declared = getattr(model, "all_tied_weights_keys", None)
    return declared if isinstance(declared, Mapping) else {}


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return True if a model declares tied weights, by attribute or in its configuration.

    Args:
        model: The model.
    """
    if declared_ties(model):
        return True
    config = getattr(model, "config", None)
    words = getattr(config, "tie_word_embeddings", False) and callable(getattr(model, "get_output_embeddings", None))
    return bool(
        (words and model.get_output_embeddings() is not None)  # type: ignore[operator]
        or (getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
    )


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie a model's parameters again after loading has separated them, so that each group is one parameter.

    In each group, the first one with values replaces the others.

    Args:
        model: The model.
        tied_params: Groups of names, as `find_tied_parameters` returned them earlier.
    """
    for group in tied_params:
        held = [model.get_parameter(name) for name in group]
        kept = next((each for each in held if not each.is_meta), held[0])
        for name in group:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, kept)


TiedTensors = MutableMapping[int, dict[torch.device, torch.Tensor]]
"""Copies of tied weights: a dict from a weight's memory address to its copy on each device."""


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: torch.device | str | int,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a module's parameter or buffer to a device, and optionally set its value or cast its dtype.

    A parameter keeps its class, its attributes and `requires_grad`. A value that is already on the device is not
    copied.

    Args:
        module: The module.
        tensor_name: Name of the tensor in the module, such as `"layers.0.weight"`.
        device: The device.
        value: New value. None keeps the tensor's own value.
        dtype: Dtype to cast a floating-point tensor to. None casts a new value to the old tensor's dtype.
        fp16_statistics: Scales of an 8-bit weight, stored as its attribute `SCB`.
        tied_params_map: Copies of tied weights, by memory address and device. An existing copy is reused, and a new one
            is added.
        non_blocking: Copy asynchronously if the source is pinned and the device supports it.
        clear_cache: Empty the device's allocator cache if the tensor leaves an accelerator.

    Raises:
        ConfigurationError: The module has no such tensor, the tensor has no value, or the new value has another shape.
    """
    table, name = locate(module, tensor_name)
    old: torch.Tensor = table[name]
    target = torch.device(device)
    if value is None and old.is_meta and target.type != "meta":
        raise ConfigurationError(
            f"{tensor_name!r} is on the meta device and has no value to copy to {target}. Pass value=..."
        )
    if value is not None and value.shape != old.shape and type(old) in (nn.Parameter, torch.Tensor):
        raise ConfigurationError(
            f"Shape mismatch for {tensor_name!r}: the tensor has {tuple(old.shape)}, but value has "
            f"{tuple(value.shape)}. Pass a value of the same shape.",
        )
    source = old if value is None else value
    address = tied_address(source, tied_params_map)
    placed = None if address is None else tied_params_map[address].get(target)  # type: ignore[index]
    if placed is not None and placed.shape == source.shape:
        alike = isinstance(placed, nn.Parameter) == isinstance(old, nn.Parameter)
        table[name] = placed if alike else _copy_to_device(old, placed, target, placed.dtype, non_blocking)
        return
    wanted = torch_dtype(dtype) if dtype is not None else None if value is None else old.dtype
    if dtype is not None and not source.is_floating_point():
        wanted = None
    if value is not None or old.device != target or wanted not in (None, old.dtype):
        table[name] = _copy_to_device(old, value, target, wanted, non_blocking)
    if fp16_statistics is not None:
        table[name].SCB = fp16_statistics.to(target)
    if address is not None:
        tied_params_map[address][target] = table[name]  # type: ignore[index]
    if clear_cache and old.device != target:
        release_memory(old.device)


def release_memory(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        get_device_kind(device.type).empty_cache()


def locate(module: nn.Module, tensor_name: str) -> tuple[dict[str, Any], str]:
    path, _, name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = nn.Module()
    for table in (owner._parameters, owner._buffers):
        if table.get(name) is not None:
            return table, name
    known = [each for each, _ in (*module.named_parameters(), *module.named_buffers())]
    raise ConfigurationError(
        f"{type(module).__name__} has no parameter or buffer named {tensor_name!r}.{nearest(tensor_name, known)}",
    )


def tied_tensors(module: nn.Module, recurse: bool = True) -> TiedTensors:
    found: dict[int, int] = {}
    for _, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
        if not parameter.is_meta and not wraps_others(parameter):
            found[parameter.data_ptr()] = found.get(parameter.data_ptr(), 0) + 1
    # Empty tensors have the address 0.
    # Each dict is filled later with copies of the parameter by device.
    return {address: {} for address, times in found.items() if times > 1 and address}


def tied_address(tensor: torch.Tensor, tied_params_map: TiedTensors | None) -> int | None:
    if not tied_params_map or tensor.is_meta or wraps_others(tensor):
        return None
    address = tensor.data_ptr()
    return address if address in tied_params_map else None


def torch_dtype(given: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        known = [name for name, each in vars(torch).items() if isinstance(each, torch.dtype)]
        raise ConfigurationError(f"{given!r} is not a dtype.{nearest(str(given), known)} Use for example 'bfloat16'.")
    return found


def _copy_to_device(
    old: torch.Tensor, value: torch.Tensor | None, device: torch.device, dtype: torch.dtype | None, non_blocking: bool
) -> torch.Tensor:
    # The copy has the class and attributes of `old`, and its value unless `value` is given.
    kind: Any = type(old)
    if _moves_itself(old) and device.type != "meta":
        # Parameter classes of other packages that quantize their value when they are moved.
        held: Any = old if value is None else kind(value, requires_grad=old.requires_grad, **vars(old))
        return held.to(device)  # type: ignore[no-any-return]
    data = (old if value is None else value).detach().to(device, dtype, non_blocking=non_blocking)
    if not isinstance(old, nn.Parameter):
        return data
    trains = old.requires_grad and (data.is_floating_point() or data.is_complex())
    if kind is nn.Parameter or wraps_others(data):
        new: torch.Tensor = nn.Parameter(data, requires_grad=trains)
    else:
        # The constructors of parameter subclasses may need other arguments.
        new = torch.Tensor._make_subclass(kind, data, trains)
    new.__dict__.update(vars(old))
    if value is None and old.grad is not None and device.type != "meta":
        new.grad = old.grad.to(device, new.dtype)
    return new


def _moves_itself(tensor: torch.Tensor) -> bool:
    mover: Callable[..., Any] = type(tensor).to
    return isinstance(tensor, nn.Parameter) and mover is not torch.Tensor.to
