"""Results on their way from a device to host memory, several batches at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.runtime.nested import recursively_apply, send_to_device
from drivetrain.runtime.state import PartialState

MOST_ITEMS = 32
MOST_BYTES = 64 * 2**20


class HostBlocks:
    """Copies results to host memory as they come, and waits for the device once for each block of them.

    A copy is queued behind what computes its source, so the source may be overwritten afterwards. What is on its way
    is in pinned memory; it is bounded, and what is handed out is not pinned.

    Args:
        state: This process and its device.
        most_items: Results of a block.
        most_bytes: Bytes of a block's tensors, from which on it is full.
    """

    def __init__(self, state: PartialState, most_items: int = MOST_ITEMS, most_bytes: int = MOST_BYTES) -> None:
        self._kind = state.kind
        self._most_items, self._most_bytes = most_items, most_bytes
        self._items: list[tuple[Any, Callable[[Any], Any] | None]] = []
        self._devices: set[torch.device] = set()
        self._bytes = 0

    def add(self, item: Any, cut: Callable[[Any], Any] | None = None) -> list[Any]:
        """Take a nested structure of tensors.

        Args:
            item: The structure. Tensors that are in host memory stay the same ones.
            cut: What is done to it in host memory, where a cut is no graph that has to be compiled.

        Returns:
            The items of the block that it completes, on the CPU; none where the block is not full yet.
        """
        own: set[torch.device] = set()

        def measure(leaf: Tensor) -> Tensor:
            self._bytes += leaf.nbytes
            if leaf.device.type != "cpu":
                own.add(leaf.device)
            return leaf

        recursively_apply(measure, item)
        # Of a device of another kind there is nothing to wait with.
        queued = own if all(device.type == self._kind.name for device in own) else set()
        self._items.append((send_to_device(item, torch.device("cpu"), non_blocking=bool(queued)), cut))
        self._devices |= queued
        full = len(self._items) >= self._most_items or self._bytes >= self._most_bytes
        return self.take() if full else []

    def take(self) -> list[Any]:
        """The items that were added since the last block, on the CPU."""
        given, self._items, self._bytes = self._items, [], 0
        for device in self._devices:
            self._kind.synchronize(device)
        items = [item if cut is None else cut(item) for item, cut in given]
        if self._devices:
            self._devices.clear()
            items = [recursively_apply(lambda leaf: leaf.clone() if leaf.is_pinned() else leaf, item) for item in items]
        return items
