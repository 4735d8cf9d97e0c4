"""Copies of tensors that training goes on changing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from drivetrain.runtime.devices import DeviceKind

_ALIGNMENT = 64


class StagingBuffer:
    """One piece of host memory for copies of a state, kept from one save to the next.

    It is page-locked where tensors are on a device that copies faster to such memory.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """How much memory is held."""
        return 0 if self._memory is None else self._memory.numel()

    def copy(self, tensors: Mapping[MetadataIndex, Tensor], kind: DeviceKind) -> dict[MetadataIndex, Tensor]:
        """Copy tensors into the buffer.

        Args:
            tensors: what to copy.
            kind: the kind of device that they are on, or the CPU.

        Returns:
            The copies, on the CPU and contiguous, valid until the next call.
        """
        starts, total = [], 0
        for tensor in tensors.values():
            starts.append(total)
            total += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        memory = self._reserve(total, pinned=kind.pins_memory and kind.name != "cpu")
        copies = {}
        for start, (index, tensor) in zip(starts, tensors.items(), strict=True):
            size = tensor.numel() * tensor.itemsize
            copy = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=memory.is_pinned())
            copies[index] = copy
        if memory.is_pinned():
            kind.synchronize()
        return copies

    def _reserve(self, size: int, pinned: bool) -> Tensor:
        if self._memory is None or self._memory.numel() < size or self._memory.is_pinned() != pinned:
            self._memory = None  # the old piece goes before the new one comes
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._memory
