"""Sizes of a model's modules in bytes, each tensor counted once."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from drivetrain.inference.model_size import LiveBytes
from drivetrain.inference.solver import Block
from drivetrain.inference.tensors import declared_ties, extent, id_tensor_storage, memory_groups
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.memory import stored_pieces
from drivetrain.strategies.wrapping import units_of

_SHORT = {"fp4": 4, "nf4": 4, "fp8": 8}


def dtype_byte_size(dtype: torch.dtype | str | Any) -> float:
    """Return the number of bytes per element of a dtype, a fraction if several elements share a byte.

    This is 0.5 for `int4` and 0.125 for `bool`.

    Args:
        dtype: The dtype, its name (also `"int4"`, `"nf4"` or `"fp8"`), or an enum member with such a value.

    Raises:
        ConfigurationError: The number of bits cannot be derived from the name.
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
            f"{dtype!r} is not a dtype with a known number of bits. Use a dtype such as torch.bfloat16 or 'int4'."
        )
    return bits / 8


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each parameter and buffer of a module.

    A shared tensor is yielded once.

    Args:
        module: The module.
        include_buffers: Include buffers.
        recurse: Include tensors of submodules.
        remove_non_persistent: Exclude non-persistent buffers.
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
    """Return the size in bytes of each module and of each tensor.

    Memory that several tensors share, fully or partly, is counted once, for the first of them.

    Args:
        model: The model.
        dtype: Count floating-point weights in this dtype if it is smaller than their own.
        special_dtypes: Dtypes of single tensors, by name.
        buffers_only: Count buffers only.

    Returns:
        A dict from the name of each module, parameter and buffer to bytes. The empty name is the whole model.
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
    if special_dtypes is not None and name in special_dtypes:
        return dtype_byte_size(special_dtypes[name]) / tensor.element_size()
    if dtype is not None and tensor.is_floating_point():
        return min(1.0, dtype_byte_size(dtype) / tensor.element_size())
    return 1.0


def new_bytes(tensor: torch.Tensor, covered: dict[Any, list[tuple[int, int]]]) -> int:
    # Memory that tensors share counts once.
    return sum(_new_bytes(piece, covered) for piece in stored_pieces(tensor))


def _new_bytes(tensor: torch.Tensor, covered: dict[Any, list[tuple[int, int]]]) -> int:
    start, end = extent(tensor)
    taken = covered[id_tensor_storage(tensor)[:2]]
    left = end - start
    reached = start
    for first, last in sorted(taken):
        # The overlap with memory that counts for an earlier tensor.
        low, high = max(first, reached), min(last, end)
        if high > low:
            left -= high - low
            reached = high
    taken.append((start, end))
    # A strided view occupies less memory than its extent.
    return min(left, tensor.numel() * tensor.element_size())


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | None,
) -> tuple[int, list[str]]:
    """Return the size in bytes of the largest indivisible module, and the names of all modules of that size.

    Args:
        modules: Names with modules, parameters or buffers.
        module_sizes: Result of `compute_module_sizes`.
        no_split_module_classes: Class names of modules that are not split.

    Returns:
        The size in bytes, and the names of all parts of this size.
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
    """Return the size of a model in bytes, and the size and names of its largest indivisible modules.

    Args:
        model: The model. Its `_no_split_modules`, if any, are the class names of modules that are not split.

    Returns:
        The total bytes, and the result of `get_max_layer_size`.
    """
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, Any]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, list(getattr(model, "_no_split_modules", None) or []))


# Blocks for the placement of a model


class Loading(NamedTuple):
    """Options that determine how much memory a model takes when it is loaded, such as the dtype of its weights.

    Attributes:
        dtype: Dtype of floating-point tensors if it is smaller than their own.
        special_dtypes: Dtypes of single tensors, by name.
        offload_buffers: Offload the buffers of offloaded blocks too.
    """

    dtype: str | torch.dtype | None = None
    special_dtypes: Mapping[str, str | torch.dtype] | None = None
    offload_buffers: bool = False


def blocks_of(
    model: nn.Module,
    no_split_module_classes: Collection[str] | str | None,
    loading: Loading,
    activations: Mapping[str, int] | None = None,
) -> list[Block]:
    units = units_of_placement(model, no_split_module_classes)
    tensors = all_tensors(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    holders = {name: _holder(name, units) for name in tensors}
    tied = _DisjointUnits(units)
    in_unit: dict[str, list[_Held]] = defaultdict(list)
    for number, group in enumerate(memory_groups(tensors, declared_ties(model))):
        size = _group_bytes(group, tensors, loading)
        inside: dict[str, list[str]] = defaultdict(list)
        for name in group:
            inside[holders[name]].append(name)
        for holder, names in inside.items():
            tied.join(holders[group[0]], holder)
            own = size if len(names) == len(group) else _group_bytes(names, tensors, loading)
            in_unit[holder].append(_Held(number, any(name in parameters for name in names), own, size))
    return [_block(names, units, in_unit, loading, activations or {}) for names in tied.groups()]


class _Held(NamedTuple):
    group: int
    is_weight: bool
    own: int
    whole: int


def units_of_placement(model: nn.Module, no_split_module_classes: Collection[str] | str | None) -> dict[str, int]:
    kept_whole = _kept_whole(model, no_split_module_classes)
    names: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        inner = {key: child for key, child in module._modules.items() if child is not None}
        if not inner or kept_whole(module):
            names.append(name)
            return
        before = f"{name}." if name else ""
        own = [*module._parameters.items(), *module._buffers.items()]
        names.extend(before + key for key, tensor in own if tensor is not None)
        for key, child in inner.items():
            visit(before + key, child)

    visit("", model)
    return {name: position for position, name in enumerate(names)}


def _kept_whole(model: nn.Module, classes: Collection[str] | str | None) -> Callable[[nn.Module], bool]:
    if classes is not None:
        wanted = {classes} if isinstance(classes, str) else set(classes)
        return lambda module: type(module).__name__ in wanted
    found = {id(module) for module in units_of(model, "auto")}
    return lambda module: id(module) in found


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _holder(name: str, units: Collection[str]) -> str:
    while name not in units:
        name = name.rpartition(".")[0]
    return name


def _group_bytes(group: Sequence[str], tensors: Mapping[str, torch.Tensor], loading: Loading) -> int:
    special = loading.special_dtypes or {}
    named = next((name for name in group if name in special), group[0])
    covered: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[Any, int] = defaultdict(int)
    for name in group:
        sizes[id_tensor_storage(tensors[name])[:2]] += new_bytes(tensors[name], covered)
    return math.ceil(max(sizes.values()) * dtype_scale(named, tensors[named], loading.dtype, special))


class _DisjointUnits:
    """Union-find structure that joins parts of a model that share weights."""

    def __init__(self, units: Collection[str]) -> None:
        self._groups = {name: [name] for name in units}

    def join(self, one: str, other: str) -> None:
        kept, joined = self._groups[one], self._groups[other]
        if kept is not joined:
            kept.extend(joined)
            self._groups.update(dict.fromkeys(joined, kept))

    def groups(self) -> Iterator[list[str]]:
        seen: set[int] = set()
        for group in self._groups.values():
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def _block(
    names: Sequence[str],
    units: Mapping[str, int],
    in_unit: Mapping[str, Sequence[_Held]],
    loading: Loading,
    activations: Mapping[str, int],
) -> Block:
    ordered = sorted(names, key=units.__getitem__)
    held = {each.group: each for name in ordered for each in in_unit.get(name, ())}
    # Buffers of offloaded blocks stay on the main device by default.
    resident = 0 if loading.offload_buffers else sum(each.whole for each in held.values() if not each.is_weight)
    streamed = max(
        sum(each.own for each in in_unit.get(name, ()) if each.is_weight or loading.offload_buffers) for name in ordered
    )
    return Block(
        names=tuple(ordered),
        positions=tuple(units[name] for name in ordered),
        size=sum(each.whole for each in held.values()),
        streamed=streamed,
        resident=resident,
        activations=max(activations.get(name, 0) for name in ordered),
    )


def activations_of(
    model: nn.Module,
    units: Collection[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: str | torch.dtype | None = None,
) -> dict[str, int]:
    """Run a model on the meta device to find the peak memory in bytes of the activations of each unit."""
    peaks: dict[str, int] = dict.fromkeys(units, 0)
    running: list[str] = []

    def begin(name: str) -> Callable[..., None]:
        def pre_hook(*_: Any) -> None:
            close()
            running.append(name)

        return pre_hook

    def close() -> None:
        name = running[-1] if running else next(iter(peaks))
        peaks[name] = max(peaks[name], live.peak)
        live.peak = live.current

    weights = {name: _without_memory(held, dtype) for name, held in [*model.named_parameters(), *model.named_buffers()]}
    modules = dict(model.named_modules(remove_duplicate=False))
    handles = [modules[name].register_forward_pre_hook(begin(name)) for name in units if name in modules]
    try:
        with torch.no_grad(), torch.device("meta"), LiveBytes() as live:
            live.add(weights)
            live.current = live.peak = 0  # weights do not count as activations
            given = _to_meta((tuple(args), dict(kwargs)), dtype)
            live.add(given)
            torch.func.functional_call(model, weights, *given)
            close()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(
            "The memory of activations cannot be measured, because forward does not run on the meta device "
            f"({error}). Omit the example inputs, and reserve memory for activations with max_memory.",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return peaks


def _to_meta(values: Any, dtype: str | torch.dtype | None) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: _without_memory(tensor, dtype), values)


def _without_memory(tensor: torch.Tensor, dtype: str | torch.dtype | None) -> torch.Tensor:
    of = dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point and tensor.is_floating_point() else None
    return torch.empty_like(tensor, device="meta", dtype=of)
