"""Moving batches to the device: on use, or on a separate stream while the previous batch is being processed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from drivetrain.data.batch_info import BatchInfo
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.pytrees import recursively_apply

Item = TypeVar("Item")
Place = Callable[[Any], Any]


class SideStreamPlacement:
    """Callable that copies batches to a device on a separate stream, in parallel with the device's computation.

    The host never waits. A copy runs beside the kernels of the previous batch, and kernels queued after `receive` wait
    for it. Copies overlap only if host memory is pinned and the placing function uses `non_blocking=True`.
    """

    def __init__(self, place: Place, kind: DeviceKind, device: torch.device, sends_ahead: bool = False) -> None:
        self._place = place
        self._kind = kind
        self._device = device
        self._stream: Any = None
        self.sends_ahead = sends_ahead

    def __call__(self, batch: Any) -> Any:
        return self.receive(self.send(batch))

    def send(self, batch: Any) -> Any:
        # Created late, so that preparing a loader does not initialise the device.
        if self._stream is None:
            self._stream = self._kind.make_stream(self._device)
        with self._kind.stream_context(self._stream):
            return self._place(batch)

    def receive(self, sent: Any) -> Any:
        current = self._kind.current_stream(self._device)
        if current is not None:
            # The device waits for the copy, the host does not.
            current.wait_stream(self._stream)
            device_type = self._device.type

            def keep(tensor: Tensor) -> Tensor:
                # Otherwise the allocator could reuse this memory while `current` still needs it.
                if tensor.device.type == device_type:
                    tensor.record_stream(current)
                return tensor

            recursively_apply(keep, sent)
        return sent


def overlapped(
    place: Place | None, device: tuple[DeviceKind, torch.device] | None, ahead: bool = False
) -> Place | None:
    if place is None or device is None or not device[0].supports_streams:
        return place
    return SideStreamPlacement(place, *device, ahead)


def sends_ahead(place: Place | None) -> bool:
    return isinstance(place, SideStreamPlacement) and place.sends_ahead


_ON_HOST, _SENT, _PLACED, _RELEASED = range(4)


class PendingBatch:
    """Batch in host memory that is copied to the device only when it is first used.

    Args:
        batch: The batch on the host.
        info: Record of the batch from its loader.
        place: Function that moves the batch to the device, or None to leave it on the host.

    Attributes:
        info: Record of the batch from its loader.
        batch_idx: Number of the batch in the epoch, set by the loop.
        tokens: Number of tokens that the task counts in the batch, if it counted them before the release.
    """

    __slots__ = ("__weakref__", "_batch", "_following", "_place", "_state", "batch_idx", "info", "tokens")

    info: BatchInfo
    batch_idx: int
    tokens: int | Tensor | None

    def __init__(self, batch: Any, info: BatchInfo, place: Place | None = None) -> None:
        self._batch, self._place = batch, place
        self._state = _PLACED if place is None else _ON_HOST
        self._following: PendingBatch | None = None
        self.info = info

    @property
    def batch(self) -> Any:
        """The data of the batch, moved to the device on first use."""
        return self.take()

    @property
    def is_missing(self) -> bool:
        return self._batch is None

    @property
    def is_released(self) -> bool:
        return self._state == _RELEASED

    def take(self) -> Any:
        # The caller releases the previous batch first, so that at most two batches are on the device.
        if self._state != _PLACED:
            self._place_now()
        return self._batch

    def _place_now(self) -> None:
        assert self._state != _RELEASED, "a batch that was released is used again"
        place: Any = self._place
        self._batch = place(self._batch) if self._state == _ON_HOST else place.receive(self._batch)
        self._state = _PLACED
        if self._following is not None:
            self._following.send()
            self._following = None

    def precede(self, following: PendingBatch) -> None:
        self._following = following

    def send(self) -> None:
        if self._state == _ON_HOST:
            self._batch = self._place.send(self._batch)  # type: ignore[union-attr]
            self._state = _SENT

    def release(self) -> None:
        if self._batch is not None:
            # Not None, which stands for a missing batch (see `is_missing`).
            self._batch = ...
        self._state = _RELEASED


class PendingParts(PendingBatch):
    __slots__ = ("_arranged", "_parts")

    def __init__(self, parts: Sequence[Any], info: BatchInfo, arranged: Callable[[list[Any]], Any]) -> None:
        # A placeholder, because the data is put together on first use.
        super().__init__(..., info)
        self._state = _ON_HOST
        self._parts, self._arranged = parts, arranged

    def _place_now(self) -> None:
        assert self._state != _RELEASED, "a batch that was released is used again"
        batches = [each.take() if isinstance(each, PendingBatch) else each for each in self._parts]
        self._batch, self._state = self._arranged(batches), _PLACED

    def release(self) -> None:
        self._parts = ()
        super().release()


def pending(pairs: Iterator[tuple[Any, BatchInfo]], place: Place | None) -> Iterator[PendingBatch]:
    if place is None:
        return starmap(PendingBatch, pairs)
    links = sends_ahead(place)
    before: Callable[[], PendingBatch | None] = _nothing

    def pend(batch: Any, info: BatchInfo) -> PendingBatch:
        nonlocal before
        current = PendingBatch(batch, info, place)
        if links:
            earlier = before()  # a weak reference, so that a batch is freed with its step
            if earlier is not None:
                earlier.precede(current)
            before = ref(current)
        return current

    return starmap(pend, pairs)


def _nothing() -> None:
    return None


def one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    held: list[Item] = []  # never holds the latest yielded item, so that it can be freed
    # Each item is yielded after the following one has been read.
    for item in items:
        held.append(item)
        del item
        if len(held) > 1:
            yield held.pop(0)
    while held:
        yield held.pop()
