"""Copies of tensors that training goes on changing."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from drivetrain.checkpoint.tensor_file import BLOCK, run_parallel
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
        copies: dict[MetadataIndex, Tensor] = {}
        plain: list[tuple[Tensor, Tensor]] = []
        for start, (index, tensor) in zip(starts, tensors.items(), strict=True):
            size = tensor.numel() * tensor.itemsize
            copy = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            if _is_plain(tensor):
                plain.append((copy, tensor))
            else:
                copy.copy_(tensor, non_blocking=memory.is_pinned())
            copies[index] = copy
        _copy_plain(plain)
        if memory.is_pinned():
            kind.synchronize()
        return copies

    def _reserve(self, size: int, pinned: bool) -> Tensor:
        if self._memory is None or self._memory.numel() < size or self._memory.is_pinned() != pinned:
            self._memory = None  # the old piece goes before the new one comes
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._memory


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes lie on the CPU in one piece, as they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy_plain(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy memory to memory in several threads.

    The C library goes past the caches, which the copy would only evict, and lets go of the GIL; a `copy_` for each
    tensor took three times as long (torch 2.13), since its threads also wait for each other after every tensor.
    """
    pieces: list[tuple[int, int, int]] = []
    for target, source in pairs:
        size = source.numel() * source.itemsize
        for start in range(0, size, BLOCK):
            pieces.append((target.data_ptr() + start, source.data_ptr() + start, min(BLOCK, size - start)))

    def work() -> None:
        while True:
            try:
                piece = pieces.pop()
            except IndexError:
                return
            ctypes.memmove(*piece)

    workers = min(torch.get_num_threads(), len(pieces))
    run_parallel([work] * workers, workers)
