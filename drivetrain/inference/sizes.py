"""How many bytes a model's modules hold, each tensor counted once."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.inference.ties import extent, id_tensor_storage, wraps_others
from drivetrain.runtime.errors import ConfigurationError

_SHORT = {"fp4": 4, "nf4": 4, "fp8": 8}


def dtype_byte_size(dtype: torch.dtype | str | Any) -> float:
    """Bytes of one element of a dtype as it is stored packed: 0.5 for 4 bits, 0.125 for a bool.

    Args:
        dtype: The dtype; its name, also of one that torch has no tensors of (`"int4"`, `"nf4"`, `"fp8"`); or an
            enumeration's member with such a value.

    Raises:
        ConfigurationError: It names no number of bits.
    """
    name = str(getattr(dtype, "value", dtype)).removeprefix("torch.")
    if name == "bool":
        return 1 / 8
    if name.startswith("complex"):
        return int(name.removeprefix("complex")) / 8
    bits: float | None = _SHORT.get(name) or next(iter(map(int, re.findall(r"[a-z](\d+)", name))), None)
    if bits is None and name in ("float", "double", "half", "int", "long", "short"):
        bits = dtype_byte_size(getattr(torch, name)) * 8
    if bits is None:
        raise ConfigurationError(
            f"{dtype!r} is no dtype with a number of bits. Give one such as torch.bfloat16 or 'int4'.", code="DT-007"
        )
    return bits / 8


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module by name, each once.

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


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of each module with all that is in it.

    Memory that several tensors share, in full or in part, is counted once: in the modules of the first of them.

    Args:
        model: The model.
        dtype: Count floats as if they were of this dtype, where that is smaller.
        special_dtypes: The same for single tensors, by name.
        buffers_only: Count buffers alone.

    Returns:
        Bytes by the names of modules, parameters and buffers; those of the whole model under the empty name.
    """
    sizes: dict[str, int] = defaultdict(int)
    sizes[""] = 0
    covered: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        own = new_bytes(tensor, covered)
        scale = dtype_scale(name, tensor, dtype, special_dtypes)
        parts = name.split(".")
        for end in range(len(parts) + 1):
            sizes[".".join(parts[:end])] += int(own * scale)
    return dict(sizes)


def dtype_scale(
    name: str,
    tensor: torch.Tensor,
    dtype: str | torch.dtype | None,
    special_dtypes: Mapping[str, str | torch.dtype] | None,
) -> float:
    """By what a tensor's bytes are multiplied when it is loaded as another dtype. See `compute_module_sizes`."""
    if special_dtypes is not None and name in special_dtypes:
        return dtype_byte_size(special_dtypes[name]) / tensor.element_size()
    if dtype is not None and tensor.is_floating_point():
        return min(1.0, dtype_byte_size(dtype) / tensor.element_size())
    return 1.0


def new_bytes(tensor: torch.Tensor, covered: dict[Any, list[tuple[int, int]]]) -> int:
    """The bytes of a tensor that none before it covers.

    Args:
        tensor: The tensor.
        covered: What those before it cover, by storage; its own is added.
    """
    return sum(_new_bytes(piece, covered) for piece in _pieces(tensor))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor is stored in: itself, or the tensors within one that wraps others (quantised, sharded)."""
    if not wraps_others(tensor):
        yield tensor
        return
    inner: Any = tensor
    for name in inner.__tensor_flatten__()[0]:
        yield from _pieces(getattr(tensor, name))


def _new_bytes(tensor: torch.Tensor, covered: dict[Any, list[tuple[int, int]]]) -> int:
    """The bytes of a tensor that no tensor before it covers."""
    start, end = extent(tensor)
    taken = covered[id_tensor_storage(tensor)[:2]]
    left = end - start
    reached = start
    for first, last in sorted(taken):
        low, high = max(first, reached), min(last, end)
        if high > low:
            left -= high - low
            reached = high
    taken.append((start, end))
    return min(left, tensor.numel() * tensor.element_size())


def parameter_size(layer: nn.Module, name: str, whole: int) -> tuple[int, int]:
    """Elements of a layer's parameter before it was quantised, and the bytes that it takes with its scales.

    Args:
        layer: The layer.
        name: The parameter's name in it.
        whole: Elements of the parameter as it is stored, of which this process may hold a part.
    """
    # Not by item, for which ZeRO-3 gathers the parameter if a forward was broken off, though only one process counts.
    parameter: Any = layer._parameters.get(name)
    stored = whole * int(parameter.element_size())
    if name != "weight":
        return whole, stored
    of_4_bits: Any = getattr(layer, "quant_state", None)
    if of_4_bits is not None:  # bitsandbytes' layers, whose parameter is packed
        second = of_4_bits.state2
        scales = [of_4_bits.absmax, *([of_4_bits.offset, second.absmax] if second is not None else [])]
        return math.prod(of_4_bits.shape), stored + _bytes_of(scales)
    if wraps_others(parameter) and not hasattr(parameter, "device_mesh"):  # torchao's, but not a sharded one
        return whole, _bytes_of(_pieces(parameter))
    # bitsandbytes' scales of 8 bits are on the weight until the first forward, and then beside it.
    rows: Any = getattr(parameter, "SCB", None)
    rows = getattr(getattr(layer, "state", None), "SCB", None) if rows is None else rows
    return whole, stored + (0 if rows is None else _bytes_of([rows]))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | None,
) -> tuple[int, list[str]]:
    """The largest part of a model that has to be on one device.

    Args:
        modules: Names and modules, parameters or buffers.
        module_sizes: What `compute_module_sizes` returned.
        no_split_module_classes: Names of classes whose modules stay whole.

    Returns:
        Its bytes, and the names of all parts of that size.
    """
    kept_whole = no_split_module_classes or ()
    largest, names = 0, list[str]()
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        inner = [] if isinstance(module, torch.Tensor) else list(module.named_children())
        if inner and type(module).__name__ not in kept_whole:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]  # type: ignore[union-attr]
            waiting = [(f"{name}.{below}", each) for below, each in (*own, *inner)] + waiting
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of a model, and the largest part of it that has to be on one device.

    Args:
        model: The model; `_no_split_modules`, as transformers' models have it, names classes that stay whole.

    Returns:
        The bytes, and what `get_max_layer_size` returns.
    """
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, Any]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, list(getattr(model, "_no_split_modules", None) or []))
