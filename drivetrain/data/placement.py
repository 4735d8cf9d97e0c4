"""Brings batches to the device: when they are used, or on a stream of their own while the one before is computed on."""

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
    """Places each batch on a stream of its own, so that the copy overlaps with compute that is still queued.

    Nothing waits on the host: the copy begins at once, beside the kernels of the batch before; kernels queued once the
    batch is received wait for the copy. It pays where host memory is pinned and the placing callable copies with
    `non_blocking=True`.
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
        """Begin to copy a batch. What is returned may be used once it was received."""
        if self._stream is None:
            self._stream = self._kind.make_stream(self._device)
        with self._kind.stream_context(self._stream):
            return self._place(batch)

    def receive(self, sent: Any) -> Any:
        """Let the kernels that are queued from now on wait for a batch that was sent."""
        current = self._kind.current_stream()
        if current is not None:
            current.wait_stream(self._stream)
            device_type = self._device.type

            def keep(tensor: Tensor) -> Tensor:
                # The allocator must not hand this memory out again before `current` is done with it.
                if tensor.device.type == device_type:
                    tensor.record_stream(current)
                return tensor

            recursively_apply(keep, sent)
        return sent


def overlapped(
    place: Place | None, device: tuple[DeviceKind, torch.device] | None, ahead: bool = False
) -> Place | None:
    """`place`, on a side stream where the device has streams; None stays None."""
    if place is None or device is None or not device[0].supports_streams:
        return place
    return SideStreamPlacement(place, *device, ahead)


def sends_ahead(place: Place | None) -> bool:
    """Whether batches may be placed while the ones before are computed on."""
    return isinstance(place, SideStreamPlacement) and place.sends_ahead


_ON_HOST, _SENT, _PLACED, _RELEASED = range(4)


class PendingBatch:
    """A batch that was read and is brought to the device when it is used, or was sent before.

    Args:
        batch: The batch on the host.
        info: What its loader recorded about it.
        place: Puts it on the device; None leaves it as it is.

    Attributes:
        info: What its loader recorded about it.
        batch_idx: Its number in the epoch, which a loop sets.
        tokens: How many tokens the task counts in it, where these are counted before it is released.
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
        """The batch, on the device."""
        return self.take()

    @property
    def is_missing(self) -> bool:
        """Whether there is None in the place of a batch."""
        return self._batch is None

    @property
    def is_released(self) -> bool:
        """Whether the batch was dropped."""
        return self._state == _RELEASED

    def take(self) -> Any:
        """The batch, on the device; the one after it, where that was read and only has to be copied, is sent too.

        Drop the batch before it first: then no more than two are on the device.
        """
        if self._state != _PLACED:
            self._bring()
        return self._batch

    def _bring(self) -> None:
        assert self._state != _RELEASED, "a batch that was released is used again"
        place: Any = self._place
        self._batch = place(self._batch) if self._state == _ON_HOST else place.receive(self._batch)
        self._state = _PLACED
        if self._following is not None:
            self._following.send()
            self._following = None

    def precede(self, following: PendingBatch) -> None:
        """Note which batch is sent while this one is computed on.

        Args:
            following: The batch that was read after this one.
        """
        self._following = following

    def send(self) -> None:
        """Begin to copy the batch, if that has not begun."""
        if self._state == _ON_HOST:
            self._batch = self._place.send(self._batch)  # type: ignore[union-attr]
            self._state = _SENT

    def release(self) -> None:
        """Drop the batch, once it is computed on."""
        if self._batch is not None:
            self._batch = ...
        self._state = _RELEASED


class PendingParts(PendingBatch):
    """A batch of several loaders together; each part is brought to the device by its own loader."""

    __slots__ = ("_arranged", "_parts")

    def __init__(self, parts: Sequence[Any], info: BatchInfo, arranged: Callable[[list[Any]], Any]) -> None:
        super().__init__(..., info)
        self._state = _ON_HOST
        self._parts, self._arranged = parts, arranged

    def _bring(self) -> None:
        assert self._state != _RELEASED, "a batch that was released is used again"
        batches = [each.take() if isinstance(each, PendingBatch) else each for each in self._parts]
        self._batch, self._state = self._arranged(batches), _PLACED

    def release(self) -> None:
        """Drop the batch, once it is computed on."""
        self._parts = ()
        super().release()


def pending(pairs: Iterator[tuple[Any, BatchInfo]], place: Place | None) -> Iterator[PendingBatch]:
    """Batches that are placed when they are used."""
    if place is None:
        return starmap(PendingBatch, pairs)
    links = sends_ahead(place)
    before: Callable[[], PendingBatch | None] = _nothing

    def pend(batch: Any, info: BatchInfo) -> PendingBatch:
        nonlocal before
        current = PendingBatch(batch, info, place)
        if links:
            earlier = before()  # weak: a batch is freed with its step
            if earlier is not None:
                earlier.precede(current)
            before = ref(current)
        return current

    return starmap(pend, pairs)


def _nothing() -> None:
    return None


def one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, each once the one after it has been read."""
    held: list[Item] = []  # never what was given last
    for item in items:
        held.append(item)
        del item
        if len(held) > 1:
            yield held.pop(0)
    while held:
        yield held.pop()
