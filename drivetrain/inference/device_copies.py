"""Group-wise copies of a model's weights to the compute device, prefetched while earlier groups compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.safetensors_file import MappedFile
from drivetrain.inference.offloaded import MappedRange, Place, mapped_range, merged, places_in, times_changed
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import ConfigurationError, nearest

# Groups of weights


KINDS = ("block", "leaf")


@dataclass(eq=False)
class Group:
    name: str  # of its first module
    modules: list[nn.Module]
    places: list[Place]  # module and attribute of each weight
    rest: list[Tensor] = field(init=False)  # the offloaded weights, one for each place

    def __post_init__(self) -> None:
        self.rest = [place.tensor for place in self.places]

    @property
    def nbytes(self) -> int:
        each = {id(tensor): tensor for tensor in self.rest}
        return sum(tensor.numel() * tensor.element_size() for tensor in each.values())


def groups_of(
    model: nn.Module,
    wanted: Collection[int],
    kind: str = "block",
    num_blocks_per_group: int = 1,
    preload_module_classes: Collection[str] | None = None,
) -> list[Group]:
    if kind not in KINDS:
        raise ConfigurationError(
            f"groups is {kind!r}, but must be one of {', '.join(map(repr, KINDS))}.{nearest(str(kind), KINDS)}"
        )
    if num_blocks_per_group < 1:
        raise ConfigurationError(f"num_blocks_per_group is {num_blocks_per_group}, but must be at least 1.")
    preloaded = set(preload_module_classes or ())
    whole = {id(module) for module in model.modules() if type(module).__name__ in preloaded}
    blocks = set() if kind == "leaf" else {id(module) for module in _blocks(model)}
    # `wanted` contains the ids of the offloaded tensors.
    groups: list[Group] = []
    # Consecutive blocks of one parent, collected until they form a group.
    run: list[tuple[str, nn.Module]] = []
    for name, module, is_whole in _outermost(model, whole | blocks):
        if (
            id(module) in blocks
            and (not run or _parent(run[-1][0]) == _parent(name))
            and len(run) < num_blocks_per_group
        ):
            run.append((name, module))
            continue
        groups.extend(_group(run, wanted, True))
        run = [(name, module)] if id(module) in blocks else []
        if not run:
            groups.extend(_group([(name, module)], wanted, is_whole))
    groups.extend(_group(run, wanted, True))
    return groups


def _blocks(model: nn.Module) -> list[nn.Module]:
    # Importing the strategies takes a second, which most uses of this package do not need.
    from drivetrain.strategies.wrapping import units_of

    return units_of(model, "auto")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _outermost(model: nn.Module, whole: Collection[int]) -> Iterator[tuple[str, nn.Module, bool]]:
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        taken = id(module) in whole
        if taken:
            inside.update(id(each) for each in module.modules())
        yield name, module, taken


def _group(modules: Sequence[tuple[str, nn.Module]], wanted: Collection[int], is_whole: bool) -> Iterator[Group]:
    places: list[Place] = []
    for _, module in modules:
        for each in module.modules() if is_whole else (module,):
            places.extend(place for place in places_in(each) if id(place.tensor) in wanted)
    if places:
        yield Group(modules[0][0], [module for _, module in modules], places)


@dataclass
class _Arrived:
    tensors: list[Tensor]
    ready: Any | None  # event after the last copy, or None for synchronous copies
    was: list[int] = field(default_factory=list)  # version counter of each copy right after it was made


class DeviceCopies:
    def __init__(
        self, groups: Sequence[Group], device: torch.device, budget: int, slots: int = 2, pin: bool = False
    ) -> None:
        self._groups, self._device = groups, device
        self._kind = get_device_kind(device.type)
        # With one slot nothing is prefetched, so a side stream would only add synchronization.
        self._side = self._kind.make_stream(device) if slots > 1 else None
        self._stays: list[bool] = []
        self._arrived: dict[int, _Arrived] = {}
        self._used: set[int] = set()
        pins = self._side is not None and self._kind.pins_memory
        for group in groups:
            # The first groups that fit the budget stay on the device after their first copy.
            budget -= group.nbytes
            self._stays.append(budget >= 0)
            if pin and pins:
                for tensor in group.rest:
                    if mapped_range(tensor) is None:
                        tensor.data = tensor.data.pin_memory()
        # A weight that has been changed in place since must not be dropped from memory: its file has the old value.
        # Buffers are excluded, since batch norms change theirs without a new tensor version.
        self._in_files = [
            [(rest, times_changed(rest)) for rest in group.rest if isinstance(rest, nn.Parameter)] for group in groups
        ]
        self._ring = _Ring(slots if pins and not pin else 0)

    def enter(self, number: int, ahead: Sequence[int]) -> None:
        if number not in self._used:
            self._use(number)
        self._prefetch(ahead)

    def _prefetch(self, numbers: Sequence[int]) -> None:
        for number in self._arrived.keys() - self._used - set(numbers):
            if not self._stays[number]:
                del self._arrived[number]
        for number in numbers:
            self._fetch(number)

    def _fetch(self, number: int) -> None:
        if number not in self._arrived:
            self._arrived[number] = self._copy(number)

    def _use(self, number: int) -> None:
        self._fetch(number)
        arrived, group = self._arrived[number], self._groups[number]
        if arrived.ready is not None:
            current = self._kind.current_stream(self._device)
            assert current is not None
            current.wait_event(arrived.ready)
            # Otherwise the allocator could reuse the memory for a copy on the side stream while kernels still read it.
            for tensor in arrived.tensors:
                tensor.record_stream(current)
        for place, tensor in zip(group.places, arrived.tensors, strict=True):
            place.put(tensor)
        arrived.was = [*map(times_changed, arrived.tensors)]
        self._used.add(number)

    def leave(self, number: int) -> None:
        if number in self._used:
            self._put_back(number)
            # The memory is freed unless the weights may stay on the device.
            if not self._stays[number]:
                del self._arrived[number]

    def remove(self) -> None:
        for number in list(self._used):
            self._put_back(number)
        self._arrived.clear()

    def _put_back(self, number: int) -> None:
        group, arrived = self._groups[number], self._arrived[number]
        self._used.discard(number)
        for place, rest, tensor, was in zip(group.places, group.rest, arrived.tensors, arrived.was, strict=True):
            place.put(rest)
            # Batch norms change their buffers without a new tensor version.
            is_written = not place.is_parameter and place.module.training
            if is_written or times_changed(tensor) != was:
                with torch.no_grad():
                    rest.copy_(tensor)

    def _on_device(self, group: Group) -> dict[int, Tensor]:
        # A weight that several groups share is copied only once.
        wanted = {id(rest) for rest in group.rest}
        return {
            id(rest): tensor
            for number, arrived in self._arrived.items()
            for rest, tensor in zip(self._groups[number].rest, arrived.tensors, strict=True)
            if id(rest) in wanted
        }

    def _copy(self, number: int) -> _Arrived:
        group = self._groups[number]
        there = self._on_device(group)
        if not there.keys() >= {id(rest) for rest in group.rest}:
            for file in dict.fromkeys(found.file for found in map(mapped_range, group.rest) if found is not None):
                file.check_unchanged()
        # Copies may outlive an `inference_mode` block, and inference tensors cannot be used outside of it.
        with torch.no_grad(), torch.inference_mode(False), self._kind.stream_context(self._side):
            slot = self._ring.take(group.nbytes)
            for rest in group.rest:
                if id(rest) not in there:
                    source = rest.detach() if rest.is_pinned() else slot.staged(rest.detach())
                    made = source.to(self._device, non_blocking=self._side is not None)
                    is_parameter = isinstance(rest, nn.Parameter)
                    there[id(rest)] = nn.Parameter(made, requires_grad=False) if is_parameter else made
            ready = slot.busy = None if self._side is None else self._side.record_event()
        for rest, was in self._in_files[number]:
            found = mapped_range(rest)
            if found is not None and times_changed(rest) == was:
                found.file.drop(found.start, found.end)
        return _Arrived([there[id(rest)] for rest in group.rest], ready)

    def __getstate__(self) -> dict[str, Any]:
        # Streams and pinned memory cannot be pickled.
        self.remove()
        return {**self.__dict__, "_side": None, "_ring": _Ring(0)}


class _Slot:
    """Pinned memory from which offloaded weights are copied to a device.

    Without memory, `staged` returns the weight as given.
    """

    def __init__(self, memory: Tensor | None = None) -> None:
        self._memory, self._used = memory, 0
        self.busy: Any | None = None

    def staged(self, weight: Tensor) -> Tensor:
        if self._memory is None:
            return weight
        size = weight.numel() * weight.element_size()
        part = self._memory[self._used : self._used + size].view(weight.dtype).view(weight.shape)
        # Round up, so that every view is aligned for its dtype.
        self._used += -(-size // 64) * 64
        return part.copy_(weight)


class _Ring:
    def __init__(self, slots: int) -> None:
        self._slots: list[_Slot] = [_Slot() for _ in range(slots)]
        self._next = 0

    def take(self, size: int) -> _Slot:
        if not self._slots:
            return _Slot()
        before = self._slots[self._next]
        if before.busy is not None:
            # Wait until the copy from this buffer has ended.
            before.busy.synchronize()
        memory = before._memory
        needed = size + 64 * 1024  # each weight starts at a multiple of 64 bytes
        if memory is None or memory.numel() < needed:
            memory = torch.empty(needed, dtype=torch.uint8, pin_memory=True)
        slot = self._slots[self._next] = _Slot(memory)
        self._next = (self._next + 1) % len(self._slots)
        return slot


# Memory-mapped weights on the CPU


class MappedPages:
    def __init__(self, groups: Sequence[Group], budget: int, cache: bool) -> None:
        self._cache = cache
        self._ranges: list[list[MappedRange]] = []
        self._files: list[list[MappedFile]] = []
        self._stays: list[bool] = []
        self._asked: set[int] = set()
        self._rest = [group.rest for group in groups]
        self._changes = [[*map(times_changed, rest)] for rest in self._rest]
        for group in groups:
            # Buffers stay in memory: batch norms change theirs in place, and no file has the new value.
            weights = [tensor for tensor in group.rest if isinstance(tensor, nn.Parameter)]
            self._ranges.append(merged(found for found in map(mapped_range, weights) if found is not None))
            held = (found.file for found in map(mapped_range, group.rest) if found is not None)
            self._files.append(list(dict.fromkeys(held)))
            budget -= group.nbytes
            self._stays.append(budget >= 0)

    def enter(self, number: int, ahead: Sequence[int]) -> None:
        for file in self._files[number]:
            file.check_unchanged()
        for each in (number, *ahead):
            if each not in self._asked:
                self._asked.add(each)
                for part in self._ranges[each]:
                    part.file.will_need(part.start, part.end)

    def leave(self, number: int) -> None:
        if self._stays[number]:
            return
        self._asked.discard(number)
        # Eviction would lose in-place changes.
        if [*map(times_changed, self._rest[number])] != self._changes[number]:
            return
        for each in self._ranges[number]:
            each.file.drop(each.start, each.end, cache=not self._cache)

    def remove(self) -> None: ...
