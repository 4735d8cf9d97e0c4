"""Copies of tensors that training continues to change.

What only an optimizer's step changes, its moments above all, is copied while the next forward and backward run, and
the next step waits for what is left. It is two thirds of what AdamW saves. torchtitan waits with all of its copies in
this way; parameters and buffers are copied at once here, because anybody may change them, `parameter.data.clamp_()`
even without a trace.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.copying import Copying, Pair
from drivetrain.checkpoint.direct import ALIGNMENT, HUGE_PAGE, huge_memory
from drivetrain.runtime.devices import DeviceKind

# Page-locked memory is in small pages, and a device takes only so many pieces at once: `aligned_block`. What begins
# where no page does is gathered into such blocks when it is written.
_OFF_PAGE = 64
_SMALLEST_LATE = 64  # bytes; step counts are less
_TOUCHED_AT_ONCE = 64 << 20
# Into huge pages 23 GB/s, against 21 in pieces of 8 MB and 20 into small pages (glibc 2.36, EPYC, two cores): pieces
# below the size of the second cache are moved by one instruction, which need not read the target first.
_COPIED_AT_ONCE = 512 << 10
# Beside training each piece costs a turn at the interpreter.
_COPIED_LATE_AT_ONCE = 4 << 20


@dataclass
class Staged:
    """Where copies of a state will be.

    Attributes:
        copies: The copies, on the CPU and contiguous.
        late: Has to finish before all of them hold their values.
    """

    copies: dict[MetadataIndex, Tensor]
    late: Copying


class StagingBuffer:
    """One piece of host memory for copies of a state, kept from one save to the next.

    It is page-locked where tensors are on a device that copies faster to such memory. Else it is in huge pages, which
    come faster, and no child gets it: the first copy after a fork would copy each page of it as well.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._used = 0
        self._preparation: _Preparation | None = None

    @property
    def nbytes(self) -> int:
        """How much memory is held, without what was never touched."""
        return self._used

    def prepare(self, likely: int, limit: int, kind: DeviceKind) -> None:
        """Get memory in the background, before the first copy: the system takes its time to hand it out.

        Nothing happens where it would be page-locked, which needs the device that this process works on.

        Args:
            likely: Bytes that will be copied, about; so many are made ready.
            limit: How many it can be at most.
            kind: The kind of device that the tensors will be on.
        """
        if likely > 0 and self._memory is None and self._preparation is None and not _is_pinned(kind):
            with contextlib.suppress(OSError):  # the copy fails if there is too little
                self._preparation = _Preparation(likely, limit)

    def release(self) -> None:
        """Give the memory back; copies stay valid as long as they are referred to."""
        if self._preparation is not None:
            self._preparation.take()
        self._memory = self._preparation = None
        self._used = 0

    def copy(
        self, files: Sequence[Mapping[MetadataIndex, Tensor]], kind: DeviceKind, may_wait: Collection[int] = ()
    ) -> Staged:
        """Copy tensors into the buffer, as files have them: one behind the other, and a file where a page begins.

        They are then written from where they lie, but for memory that is page-locked.

        Args:
            files: What to copy, for each file in its order.
            kind: The kind of device that they are on, or the CPU.
            may_wait: `address_of` of tensors that do not change before `late` of the result has finished.

        Returns:
            The copies, valid until the next call.
        """
        pinned = _is_pinned(kind)
        placed: list[tuple[MetadataIndex, Tensor, int]] = []
        total = 0
        for file in files:
            total = -(-total // ALIGNMENT) * ALIGNMENT + (_OFF_PAGE if pinned else 0)
            for index, tensor in file.items():
                placed.append((index, tensor, total))
                total += tensor.numel() * tensor.itemsize
        memory = self._reserve(total, pinned)
        copies: dict[MetadataIndex, Tensor] = {}
        now: list[Pair] = []
        late: list[Pair] = []
        for index, tensor, start in placed:
            size = tensor.numel() * tensor.itemsize
            copy = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            if not _is_plain(tensor):
                copy.copy_(tensor, non_blocking=memory.is_pinned())
            elif size >= _SMALLEST_LATE and address_of(tensor) in may_wait:
                late.append((index.fqn, copy, tensor))
            else:
                now.append((index.fqn, copy, tensor))
            copies[index] = copy
        Copying(now, _COPIED_AT_ONCE).finish(torch.get_num_threads())
        if memory.is_pinned():
            kind.synchronize()
        return Staged(copies, Copying(late, _COPIED_LATE_AT_ONCE))

    def _reserve(self, size: int, pinned: bool) -> Tensor:
        if self._preparation is not None:
            self._memory, self._used = self._preparation.take()
            self._preparation = None
        if self._memory is None or self._memory.numel() < size or self._memory.is_pinned() != pinned:
            self._memory, self._used = None, 0  # the old piece goes before the new one comes
            self._memory = _host_memory(size, pinned)
        self._used = max(self._used, size)
        return self._memory


class _Preparation:
    """Memory on its way."""

    def __init__(self, likely: int, limit: int) -> None:
        self._touched = 0
        self._memory = _host_memory(max(likely, limit), pinned=False)
        self._needed = threading.Event()
        # Not a daemon: one that the interpreter's end finds within torch brings the process down.
        self._thread = threading.Thread(target=self._touch, args=(likely,), name="drivetrain-staging")
        self._thread.start()

    def take(self) -> tuple[Tensor, int]:
        """The memory, and how much of it has been touched by now; the rest comes when it is."""
        self._needed.set()
        self._thread.join()
        return self._memory, self._touched

    def _touch(self, size: int) -> None:
        for start in range(0, size, _TOUCHED_AT_ONCE):
            if self._needed.is_set():
                return
            end = min(size, start + _TOUCHED_AT_ONCE)
            self._memory[start : end : mmap.PAGESIZE].zero_()
            self._touched = end


def _is_pinned(kind: DeviceKind) -> bool:
    return kind.pins_memory and kind.name != "cpu"


def _host_memory(size: int, pinned: bool) -> Tensor:
    if pinned or size < HUGE_PAGE:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    return torch.frombuffer(huge_memory(size), dtype=torch.uint8)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes lie on the CPU in one piece, as they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def addresses_of(values: Iterable[Any]) -> set[int]:
    """`address_of` those values that are tensors in memory, or of this process's part of them."""
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    return {address_of(tensor) for tensor in local if type(tensor) is Tensor and has_address(tensor)}


def has_address(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that has an address: not on the meta device, nor where graphs are compiled."""
    try:
        address_of(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass may have no storage of its own
        return False
    return not tensor.is_meta


def address_of(tensor: Tensor) -> int:
    """Where the memory begins that a tensor lies in; tensors that share memory have the same."""
    return tensor.untyped_storage().data_ptr()
