"""Files in safetensors' layout, written and read without a second copy of what they hold.

Layout: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from drivetrain.runtime.errors import CheckpointError

BLOCK = 8 << 20
"""Bytes that are written, read and hashed at once."""

CACHE_LINE = 64
"""Bytes. torch's own memory begins at one, and kernels may round otherwise elsewhere."""

WORKERS = min(4, os.cpu_count() or 1)
"""Files that are written or read at once."""

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "complex64": "C64",
}


FOLDER = "tensors"
"""The folder of a checkpoint that its tensors and their index are in."""

INDEX = f"{FOLDER}/index.json"


@dataclass(frozen=True)
class FileDigest:
    """One file's size and hash in a manifest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One tensor, or one part of one, as it lies in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of_part(
        cls, key: str, dtype: torch.dtype, size: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
    ) -> Entry:
        """Describe a part of a tensor. A part that is not the whole has its offsets in its name."""
        is_whole = tuple(sizes) == tuple(size)
        return cls(key if is_whole else f"{key}@{','.join(map(str, offsets))}", dtype, tuple(sizes))

    @property
    def nbytes(self) -> int:
        """Its length in the file."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def described(self, start: int) -> dict[str, Any]:
        """The header's words for it; a dtype that the format has no name for is kept as bytes."""
        name = dtype_name(self.dtype)
        known = name in _NAMES
        return {
            "dtype": _NAMES[name] if known else "U8",
            "shape": list(self.shape) if known else [self.nbytes],
            "data_offsets": [start, start + self.nbytes],
        }


@dataclass(frozen=True)
class Place:
    """Where one part of a tensor lies."""

    file: str
    start: int
    nbytes: int


def dtype_name(dtype: torch.dtype) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a file's header calls by this name."""
    found = next((ours for ours, theirs in _NAMES.items() if theirs == name), None)
    if found is None:
        raise ValueError(f"{name!r} is no dtype that is known here; known are {', '.join(_NAMES.values())}")
    return getattr(torch, found)  # type: ignore[no-any-return]


def layout(entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> tuple[bytes, list[int]]:
    """Make a file's header."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, position = [], 0
    for entry in entries:
        header[entry.name] = entry.described(position)
        starts.append(position)
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % CACHE_LINE)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [begin + start for start in starts]


def aligned(entries: Iterable[Entry]) -> list[int]:
    """The order in which entries lie so that each is aligned: positions.

    Those that fill whole lines of a cache are first, and begin with one each; then those whose length is a multiple of
    32 bytes, of 16, and so on, so that each begins at a multiple of its items' size.
    """
    listed = list(entries)
    return sorted(range(len(listed)), key=lambda index: -math.gcd(listed[index].nbytes, CACHE_LINE))


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes on the CPU, without a copy where it lies there in one piece."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 0:
        return memoryview(b"")
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def takes_bytes(target: Tensor, dtype: torch.dtype) -> bool:
    """Whether a file's bytes can be read straight into a tensor's memory."""
    plain = target.device.type == "cpu" and target.is_contiguous() and not target.is_neg() and not target.is_conj()
    return plain and target.dtype == dtype


def blocks_of(data: memoryview, size: int = BLOCK) -> Iterator[memoryview]:
    """Cut bytes into blocks."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def run_parallel(jobs: Sequence[Callable[[], None]], workers: int) -> None:
    """Run jobs in threads and raise the first error, once all threads have ended.

    Plain threads: an executor takes no work any more once the interpreter has begun to end, and a checkpoint is
    written to its end even then.
    """
    if len(jobs) <= 1 or workers <= 1:
        for job in jobs:
            job()
        return
    waiting = list(reversed(jobs))
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                job = waiting.pop()
            except IndexError:
                return
            try:
                job()
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name="drivetrain-io") for _ in range(min(workers, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# Safetensors files in memory as they are on disk: read as they are used, and never written


_LENGTH = 8  # bytes that hold the length of the header
_LONGEST_HEADER = 100 << 20
# Python 3.11 has no name for it. Without it, Linux refuses a mapping that is larger than memory and swap.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

# For one call Linux reads no more ahead than the device's read-ahead, and drops the rest of what was asked for.
_AHEAD = 128 << 10


@dataclass(frozen=True)
class Placed:
    """A tensor in a file.

    Attributes:
        entry: Its name, dtype and shape.
        start: Where in the file its bytes begin.
    """

    entry: Entry
    start: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.start + self.entry.nbytes


def read_header(head: bytes, size: int, where: str) -> tuple[dict[str, Placed], dict[str, str]]:
    """What a safetensors file holds."""
    length = header_length(head, size, where)
    begin = _LENGTH + length
    try:
        header = json.loads(head[_LENGTH:begin])
        metadata = header.pop("__metadata__", {})
        placed = sorted((_placed(name, one, begin) for name, one in header.items()), key=lambda one: one.start)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read: its header is damaged ({error}).") from error
    reached = begin
    for one in placed:
        if one.start != reached:
            raise CheckpointError(
                f"{where} is damaged: {one.entry.name} does not begin where the tensor before it ends."
            )
        reached = one.end
    if reached != size:
        problem = "is truncated" if size < reached else "is damaged"
        raise CheckpointError(f"{where} {problem}: its header describes {reached} bytes, and it has {size}.")
    return {one.entry.name: one for one in placed}, {str(key): str(value) for key, value in metadata.items()}


def header_length(head: bytes, size: int, where: str) -> int:
    """Bytes of a file's header after the eight that hold this number."""
    length = int.from_bytes(head[:_LENGTH], "little") if len(head) >= _LENGTH else 0
    if not 0 < length <= min(size - _LENGTH, _LONGEST_HEADER):
        raise CheckpointError(f"{where} cannot be read: it does not begin as a safetensors file does.")
    return length


def _placed(name: str, described: Mapping[str, Any], begin: int) -> Placed:
    dtype = dtype_named(described["dtype"])
    shape = tuple(described["shape"])
    start, end = described["data_offsets"]
    if not all(type(count) is int and count >= 0 for count in (*shape, start, end)):
        raise ValueError(f"{name} has the shape {list(shape)} and lies at {[start, end]}")
    entry = Entry(name, dtype, shape)
    if end - start != entry.nbytes:
        raise ValueError(f"{name} takes {entry.nbytes} bytes by its dtype and shape, but {end - start} by its place")
    return Placed(entry, begin + start)


def _whole(raw: Entry, size: int, where: str) -> Placed:
    if raw.nbytes > size:
        raise CheckpointError(f"{where} is truncated: {raw.name} takes {raw.nbytes} bytes, and it has {size}.")
    return Placed(raw, 0)


class MappedFile:
    """A safetensors file whose tensors are its bytes on disk, without a copy.

    The file is never written: where a tensor is changed in place, the pages changed become the process's own.

    Attributes:
        path: Its path.
        placed: Where each tensor lies, by name, in the order of the file.
        metadata: The text in its header.
    """

    def __init__(self, path: str | os.PathLike[str], raw: Entry | None = None) -> None:
        self.path, self._raw = os.path.abspath(os.fspath(path)), raw
        self.metadata: dict[str, str] = {}
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if raw is None:
                    head = file.read(_LENGTH)
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
        """Refuse a file that is not as it was when it was opened, before its bytes are used."""
        try:
            found = os.stat(self.path)
            same = (found.st_size, found.st_mtime_ns, found.st_ino) == self._opened
            what = f"has changed: it had {self._opened[0]} bytes, and has {found.st_size} of another time now"
        except OSError as error:
            same, what = False, f"cannot be read any more ({error.strerror or error})"
        if not same:
            raise CheckpointError(f"{self.path} {what}, while a model runs from it. Load the model again.")

    def tensor(self, name: str) -> Tensor:
        """A tensor over the file; a copy in memory where it lies at an address that its dtype does not allow."""
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
        """Whether `tensor` gives this one without a copy."""
        place = self.placed[name]
        return place.start % place.entry.dtype.itemsize == 0

    def read_into(self, name: str, target: memoryview) -> None:
        """Fill a buffer with a tensor's bytes, past the mapping."""
        position = self.placed[name].start
        self.will_need(position, position + len(target))
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(position)
                while len(target):
                    count = file.readinto(target)
                    if not count:
                        raise CheckpointError(f"{self.path} ends within {name}. It was truncated while it was read.")
                    target = target[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def will_need(self, start: int, end: int) -> None:
        """Let the system read a part of the file ahead, meanwhile."""
        start -= start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_WILLNEED"):
            for position in range(start, end, _AHEAD):
                self._map.madvise(mmap.MADV_WILLNEED, position, min(_AHEAD, end - position))

    def drop(self, start: int, end: int, cache: bool = False) -> None:
        """Take the pages of a part of the file out of this process's memory; they are read again when they are used."""
        start += -start % mmap.PAGESIZE
        end -= end % mmap.PAGESIZE
        if end <= start:
            return
        # Elsewhere this means something else, or nothing.
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
        if cache and hasattr(os, "posix_fadvise"):
            with open(self.path, "rb") as file:
                os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def _mapping(file: int) -> mmap.mmap:
    """The file's pages, so that a change to them is this process's own, and no error of the machine."""
    if os.fstat(file).st_size == 0:
        return mmap.mmap(-1, 1)
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    try:
        return mmap.mmap(file, 0, mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:  # a system that counts what could be changed as memory
        return mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)


_RANGE = "_drivetrain_mapped"


@dataclass(frozen=True)
class MappedRange:
    """What part of which file a tensor is.

    Attributes:
        file: The file.
        start: Its first byte there.
        end: The one after its last.
    """

    file: MappedFile
    start: int
    end: int


def mark_mapped(tensor: Tensor, file: MappedFile, name: str) -> None:
    """Note on a parameter or buffer that it is a tensor of a file."""
    place = file.placed[name]
    setattr(tensor, _RANGE, MappedRange(file, place.start, place.end))


def forget_mapped(tensor: Tensor) -> None:
    """Remove what `mark_mapped` noted."""
    vars(tensor).pop(_RANGE, None)


def mapped_range(tensor: Tensor) -> MappedRange | None:
    """The part of a file that a parameter or buffer is; None where it is in memory of its own."""
    found = getattr(tensor, _RANGE, None)
    return found if isinstance(found, MappedRange) else None


_changes = attrgetter("_version")  # torch counts the changes in place


def times_changed(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor.is_inference() else int(_changes(tensor))


def merged(ranges: Iterator[MappedRange]) -> list[MappedRange]:
    """Ranges of files with those joined that touch or overlap."""
    joined: list[MappedRange] = []
    for each in sorted(ranges, key=lambda one: (one.file.path, one.start)):
        last = joined[-1] if joined else None
        if last is not None and last.file is each.file and each.start <= last.end:
            joined[-1] = MappedRange(last.file, last.start, max(last.end, each.end))
        else:
            joined.append(each)
    return joined
