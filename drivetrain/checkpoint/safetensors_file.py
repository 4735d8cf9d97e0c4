"""Memory-mapped safetensors files, whose tensors are read from disk when they are used."""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.tree import Entry, Placed, header_length, read_header
from drivetrain.runtime.errors import CheckpointError

# Python 3.11 has no MAP_NORESERVE. Without this flag, Linux refuses a mapping larger than memory and swap.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

# Linux limits each request to the device's read-ahead and ignores the rest, so requests are split.
_AHEAD = 128 << 10


def _whole(raw: Entry, size: int, where: str) -> Placed:
    if raw.nbytes > size:
        raise CheckpointError(f"{where} is truncated: {raw.name} needs {raw.nbytes} bytes, but the file has {size}.")
    return Placed(raw, 0)


class MappedFile:
    """Safetensors file that is mapped into memory, so that its tensors need no copy.

    The file is never modified. An in-place change of a tensor copies the affected pages for this process
    (copy-on-write).

    Attributes:
        path: The path of the file.
        placed: The entry and position of each tensor, by name, in file order.
        metadata: The metadata of the file's header.
    """

    def __init__(self, path: str | os.PathLike[str], raw: Entry | None = None) -> None:
        self.path, self._raw = os.path.abspath(os.fspath(path)), raw
        self.metadata: dict[str, str] = {}
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if raw is None:
                    head = file.read(8)
                    head += file.read(header_length(head, found.st_size, self.path))
                    self.placed, self.metadata = read_header(head, found.st_size, self.path)
                else:
                    self.placed = {raw.name: _whole(raw, found.st_size, self.path)}
                self._map = _mapping(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        self._opened = found.st_size, found.st_mtime_ns, found.st_ino

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedFile, (self.path, self._raw)

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedFile:
        return self

    def check_unchanged(self) -> None:
        """Raise an error if the file on disk has changed since it was mapped."""
        try:
            found = os.stat(self.path)
            same = (found.st_size, found.st_mtime_ns, found.st_ino) == self._opened
            what = f"has changed (it had {self._opened[0]} bytes, and was now written again with {found.st_size})"
        except OSError as error:
            same, what = False, f"cannot be read any more ({error.strerror or error})"
        if not same:
            raise CheckpointError(f"{self.path} {what} while a model uses this file. Load the model again.")

    def tensor(self, name: str) -> Tensor:
        # A view of the file's mapped memory, or a copy if the position is not a multiple of the item size.
        place = self.placed[name]
        dtype, shape = place.entry.dtype, place.entry.shape
        if place.entry.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        aligned = place.start % dtype.itemsize == 0
        count = place.entry.nbytes // (dtype.itemsize if aligned else 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=dtype if aligned else torch.uint8, count=count, offset=place.start)
        return (flat if aligned else flat.clone().view(dtype)).reshape(shape)

    def is_aligned(self, name: str) -> bool:
        place = self.placed[name]
        # Otherwise the tensor must be copied from the mapped memory.
        return place.start % place.entry.dtype.itemsize == 0

    def read_into(self, name: str, target: memoryview) -> None:
        position = self.placed[name].start
        self.will_need(position, position + len(target))
        try:
            # Ordinary reads do not add pages of the file to this process's memory.
            with open(self.path, "rb", buffering=0) as file:
                file.seek(position)
                while len(target):
                    count = file.readinto(target)
                    if not count:
                        raise CheckpointError(f"{self.path} ends within {name}: it was truncated during the read.")
                    target = target[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def will_need(self, start: int, end: int) -> None:
        """Advise the operating system to read a byte range of the file ahead."""
        start -= start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_WILLNEED"):
            for position in range(start, end, _AHEAD):
                self._map.madvise(mmap.MADV_WILLNEED, position, min(_AHEAD, end - position))

    def drop(self, start: int, end: int, cache: bool = False) -> None:
        # Frees the memory of a byte range, and with `cache` also its pages in the system's file cache.
        # Whole pages only, because the others also contain bytes outside of the range.
        start += -start % mmap.PAGESIZE
        end -= end % mmap.PAGESIZE
        if end <= start:
            return
        # On other systems MADV_DONTNEED has another effect, or none.
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
        if cache and hasattr(os, "posix_fadvise"):
            with open(self.path, "rb") as file:
                os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def _mapping(file: int) -> mmap.mmap:
    # An empty file cannot be mapped.
    if os.fstat(file).st_size == 0:
        return mmap.mmap(-1, 1)
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    try:
        # Private, so that changes of tensors never reach the file.
        return mmap.mmap(file, 0, mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:  # the system reserves memory for all pages that could be changed
        return mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
