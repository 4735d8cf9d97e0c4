"""Reading and writing local files past the page cache (`O_DIRECT`, Linux).

A checkpoint is read once, if ever. In the page cache it displaces what is needed, such as data sets, and allocating
its pages can take longer than the disk does. Where a file system does not support it, the page cache is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys

import numpy as np

BLOCK = 4 << 20
"""Bytes that are written or read past the cache at once."""

ALIGNMENT = 4096
"""Of memory, offset and length in direct transfers; some devices would take less."""

HUGE_PAGE = 2 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_KNOWN = sys.platform == "linux" and _O_DIRECT != 0
# EFAULT: memory that a driver has mapped, from which the kernel copies but a device may not.
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EFAULT)


def aligned_block() -> memoryview:
    """Memory for a block, such as direct input and output need it.

    In huge pages, since a device takes only so many pieces of memory at once: that made a disk three times as fast. A
    child gets none of it: a fork during a transfer could part the memory from the transfer, open(2).
    """
    return huge_memory(BLOCK)


def huge_memory(size: int) -> memoryview:
    """Memory in huge pages that no child gets; ordinary memory where there are none. It comes as it is touched."""
    if sys.platform != "linux":
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -address_of(memory) % HUGE_PAGE
    return memoryview(memory)[start : start + size]


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between buffers of one length, without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def address_of(data: memoryview | mmap.mmap) -> int:
    """Where a buffer begins."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def is_direct(data: memoryview, position: int) -> bool:
    """Whether data can be written directly from where it lies, at a position of a file."""
    return _KNOWN and position % ALIGNMENT == 0 and address_of(data) % ALIGNMENT == 0


class DirectSwitch:
    """Turns direct transfers of an open file on and off, as each transfer allows it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.on = False
        self._possible = _KNOWN

    def fit(self, data: memoryview, position: int) -> memoryview:
        """Set the file up for transferring `data` at a position; returns how much of it to transfer first."""
        length = len(data) // ALIGNMENT * ALIGNMENT
        fits = self._possible and length > 0 and position % ALIGNMENT == 0 and address_of(data) % ALIGNMENT == 0
        self._turn(fits)
        return data[:length] if self.on else data

    def refused(self, error: OSError) -> bool:
        """Whether a transfer failed only because it was direct; then none is from now on."""
        if not self.on or error.errno not in _REFUSED:
            return False
        self._turn(False)
        self._possible = False
        return True

    def _turn(self, on: bool) -> None:
        if on == self.on:
            return
        import fcntl

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
        except OSError as error:
            if not on or error.errno not in _REFUSED:
                raise
            self._possible = False
            return
        self.on = on


class DirectReader:
    """A local file read past the page cache, but for what is in it already.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._switch = DirectSwitch(self._descriptor)
        self._cached = _cached_blocks(self._descriptor)
        self._position = 0
        self._block = aligned_block()
        self._start = self._end = 0  # what of the file is in the block

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the buffer, or as much of it as there is in one step; returns how much."""
        if not len(buffer):
            return 0
        start = self._position
        if not self._start <= start < self._end:
            number = start // BLOCK
            if number >= len(self._cached) or self._cached[number]:
                # To the end of the block only, since the next one may not be cached.
                part = buffer[: BLOCK - start % BLOCK]
                self._switch.fit(part[:0], start)
                count = os.preadv(self._descriptor, [part], start)
                self._position += count
                return count
            self._fetch(number * BLOCK)
        count = min(len(buffer), self._end - start)
        if count <= 0:
            return 0
        copy_bytes(buffer[:count], self._block[start - self._start :][:count])
        self._position += count
        return count

    def seek(self, offset: int, /) -> int:
        """Continue reading from there."""
        self._position = offset
        return offset

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _fetch(self, start: int) -> None:
        self._start = self._end = start
        while self._end < start + BLOCK:
            part = self._switch.fit(self._block[self._end - start :], self._end)
            try:
                count = os.preadv(self._descriptor, [part], self._end)
            except OSError as error:
                if self._switch.refused(error):
                    continue
                raise
            self._end += count
            if count < len(part):
                return  # the file's end


def _cached_blocks(descriptor: int) -> list[bool]:
    """For each block of a file, whether most of it is in the page cache. All, where that cannot be found out."""
    size = os.fstat(descriptor).st_size
    everything = [True] * -(-size // BLOCK)
    if not _KNOWN or not size:
        return everything
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    try:
        mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    except OSError:
        return everything
    with mapped:
        known: int = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(address_of(mapped)), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
    if known != 0:
        return everything
    each = BLOCK // mmap.PAGESIZE
    return [bool((pages[start : start + each] & 1).mean() > 0.5) for start in range(0, len(pages), each)]
