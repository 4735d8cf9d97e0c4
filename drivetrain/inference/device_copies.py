"""Weights that are copied to the device that computes, a group at a time, while it computes with those before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.mapped_file import mapped_range, times_changed
from drivetrain.inference.groups import Group
from drivetrain.runtime.devices import get_device_kind


@dataclass
class _Arrived:
    """A group's copies on the device.

    Attributes:
        tensors: One for each of its places.
        ready: Recorded after the last copy; None where copies are made at once.
        was: For each place how often its copy had been changed in place when it was made.
    """

    tensors: list[Tensor]
    ready: Any | None
    was: list[int] = field(default_factory=list)


class DeviceCopies:
    """Copies groups of weights to a device, on a stream of their own where it has streams.

    Args:
        groups: The groups, whose weights are on the host.
        device: The device.
        budget: Bytes of the first groups that stay there once they are there.
        slots: How many groups are on their way at once, each through page-locked memory of its own.
        pin: Whether weights are page-locked where they are instead, which takes as much memory as they do.
    """

    def __init__(
        self, groups: Sequence[Group], device: torch.device, budget: int, slots: int = 2, pin: bool = False
    ) -> None:
        self._groups, self._device = groups, device
        self._kind = get_device_kind(device.type)
        self._side = self._kind.make_stream(device) if slots > 1 else None
        self._stays: list[bool] = []
        self._arrived: dict[int, _Arrived] = {}
        self._used: set[int] = set()
        pins = self._side is not None and self._kind.pins_memory
        for group in groups:
            budget -= group.nbytes
            self._stays.append(budget >= 0)
            if pin and pins:
                for tensor in group.rest:
                    if mapped_range(tensor) is None:
                        tensor.data = tensor.data.pin_memory()
        # Not buffers, nor what is changed in place: that is in no file. Each with how often it was changed by now.
        self._in_files = [
            [(rest, times_changed(rest)) for rest in group.rest if isinstance(rest, nn.Parameter)] for group in groups
        ]
        self._ring = _Ring(slots if pins and not pin else 0)

    def enter(self, number: int, ahead: Sequence[int]) -> None:
        """Put a group's copies in the places of its weights, and start copying others."""
        if number not in self._used:
            self._use(number)
        self._prefetch(ahead)

    def _prefetch(self, numbers: Sequence[int]) -> None:
        """Start copying groups, and free those that were copied ahead and are not among them."""
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
            current = self._kind.current_stream()
            assert current is not None
            current.wait_event(arrived.ready)
            for tensor in arrived.tensors:
                tensor.record_stream(current)
        for place, tensor in zip(group.places, arrived.tensors, strict=True):
            place.put(tensor)
        arrived.was = [*map(times_changed, arrived.tensors)]
        self._used.add(number)

    def leave(self, number: int) -> None:
        """Put a group's weights back, and free their copies unless they stay."""
        if number in self._used:
            self._put_back(number)
            if not self._stays[number]:
                del self._arrived[number]

    def remove(self) -> None:
        """Put all weights back, and free all copies."""
        for number in list(self._used):
            self._put_back(number)
        self._arrived.clear()

    def _put_back(self, number: int) -> None:
        group, arrived = self._groups[number], self._arrived[number]
        self._used.discard(number)
        for place, rest, tensor, was in zip(group.places, group.rest, arrived.tensors, arrived.was, strict=True):
            place.put(rest)
            # Batch norms change their buffers without torch counting it.
            is_written = not place.is_parameter and place.module.training
            if is_written or times_changed(tensor) != was:
                with torch.no_grad():
                    rest.copy_(tensor)

    def _on_device(self, group: Group) -> dict[int, Tensor]:
        """Copies of its weights that other groups have there already."""
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
        # Streams and page-locked memory are this process's own.
        self.remove()
        return {**self.__dict__, "_side": None, "_ring": _Ring(0)}


class _Slot:
    """Page-locked memory that a group goes through; without any, its weights go from where they are."""

    def __init__(self, memory: Tensor | None = None) -> None:
        self._memory, self._used = memory, 0
        self.busy: Any | None = None

    def staged(self, weight: Tensor) -> Tensor:
        """The weight in this memory."""
        if self._memory is None:
            return weight
        size = weight.numel() * weight.element_size()
        part = self._memory[self._used : self._used + size].view(weight.dtype).view(weight.shape)
        self._used += -(-size // 64) * 64
        return part.copy_(weight)


class _Ring:
    """Slots that are used again in turn, once what was last in them has arrived."""

    def __init__(self, slots: int) -> None:
        self._slots: list[_Slot] = [_Slot() for _ in range(slots)]
        self._next = 0

    def take(self, size: int) -> _Slot:
        """The next slot, for a group of so many bytes."""
        if not self._slots:
            return _Slot()
        before = self._slots[self._next]
        if before.busy is not None:
            before.busy.synchronize()
        memory = before._memory
        needed = size + 64 * 1024  # each weight begins at a multiple of 64
        if memory is None or memory.numel() < needed:
            memory = torch.empty(needed, dtype=torch.uint8, pin_memory=True)
        slot = self._slots[self._next] = _Slot(memory)
        self._next = (self._next + 1) % len(self._slots)
        return slot
