"""Copies batches to the device on a stream of its own, beside what the device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.nested import recursively_apply


class SideStreamPlacement:
    """Places each batch on a stream of its own, so that the copy overlaps with compute that is still queued.

    Nothing is read ahead and nothing waits on the host: the copy begins at once, beside the kernels of the step
    before, which the device still runs when the host comes for the next batch; kernels queued from then on wait for
    the copy. It pays where host memory is pinned and the placing callable copies with `non_blocking=True`.

    Args:
        place: Puts a batch on the device.
        kind: The kind of device, which must support streams.
        device: The device.
    """

    def __init__(self, place: Callable[[Any], Any], kind: DeviceKind, device: torch.device) -> None:
        self._place = place
        self._kind = kind
        self._device = device
        self._stream: Any = None

    def __call__(self, batch: Any) -> Any:
        if self._stream is None:
            self._stream = self._kind.make_stream(self._device)
        with self._kind.stream_context(self._stream):
            placed = self._place(batch)
        current = self._kind.current_stream()
        if current is not None:
            current.wait_stream(self._stream)
            device_type = self._device.type

            def keep(tensor: Tensor) -> Tensor:
                # The allocator must not hand this memory out again before `current` is done with it.
                if tensor.device.type == device_type:
                    tensor.record_stream(current)
                return tensor

            recursively_apply(keep, placed)
        return placed


def overlapped(
    place: Callable[[Any], Any] | None, device: tuple[DeviceKind, torch.device] | None
) -> Callable[[Any], Any] | None:
    """`place`, on a side stream where the device has streams; None stays None."""
    if place is None or device is None or not device[0].supports_streams:
        return place
    return SideStreamPlacement(place, *device)
