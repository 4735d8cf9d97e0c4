"""The blocks that a model is placed by: modules that are kept whole, and together those that share weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from drivetrain.inference.sizes import dtype_scale, new_bytes
from drivetrain.inference.solver import Block
from drivetrain.inference.ties import declared_ties, id_tensor_storage, memory_groups
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.live_bytes import LiveBytes
from drivetrain.strategies.wrapping import units_of


class Loading(NamedTuple):
    """As what a model's tensors are loaded.

    Attributes:
        dtype: Floats are of this dtype, where that is smaller.
        special_dtypes: The same for single tensors, by name.
        offload_buffers: Whether buffers of blocks that are kept elsewhere are kept there too.
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
    """A model's blocks in the order in which its modules are registered, which is that of execution.

    Args:
        model: The model.
        no_split_module_classes: Names of classes whose modules are kept whole. None for those that the model names
            itself, else the blocks that it repeats.
        loading: As what its tensors are loaded.
        activations: What `activations_of` returned.
    """
    units = units_of_placement(model, no_split_module_classes)
    tensors = all_tensors(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    holders = {name: _holder(name, units) for name in tensors}
    tied = _Joined(units)
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
    """What a unit has of the memory that tensors share, most of them with none: its group, and bytes."""

    group: int
    is_weight: bool
    own: int
    whole: int


def units_of_placement(model: nn.Module, no_split_module_classes: Collection[str] | str | None) -> dict[str, int]:
    """Names of the smallest parts that are placed, and the position of each: whole modules, and tensors beside them."""
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
    """Parameters and buffers of a model under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _holder(name: str, units: Collection[str]) -> str:
    """The unit that a tensor is in."""
    while name not in units:
        name = name.rpartition(".")[0]
    return name


def _group_bytes(group: Sequence[str], tensors: Mapping[str, torch.Tensor], loading: Loading) -> int:
    """Bytes of tensors that share memory; those that are only declared as tied are loaded once."""
    special = loading.special_dtypes or {}
    named = next((name for name in group if name in special), group[0])
    covered: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[Any, int] = defaultdict(int)
    for name in group:
        sizes[id_tensor_storage(tensors[name])[:2]] += new_bytes(tensors[name], covered)
    return math.ceil(max(sizes.values()) * dtype_scale(named, tensors[named], loading.dtype, special))


class _Joined:
    """Units in groups that are joined; a group is where its first unit is."""

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
    """Bytes of what one forward has alive at most while it computes each unit, beside weights; nothing is allocated.

    Args:
        model: The model; it is left as it is.
        units: Names of its units.
        args: Positional arguments of an example; only their shapes and dtypes count.
        kwargs: Keyword arguments of it.
        dtype: Compute in this dtype, where it is one of torch's.

    Raises:
        ConfigurationError: The model does not run without values.
    """
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
            live.current = live.peak = 0  # weights live through all of it
            given = _to_meta((tuple(args), dict(kwargs)), dtype)
            live.add(given)
            torch.func.functional_call(model, weights, *given)
            close()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"The activations cannot be measured: the forward does not run on tensors without values ({error}). "
            "Leave the example inputs out, and keep room for activations in max_memory.",
            code="DT-112",
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
