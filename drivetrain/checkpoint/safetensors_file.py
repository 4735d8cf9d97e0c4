"""Files in safetensors' layout, written and read without a second copy of what they hold.

Layout: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import math
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Queue, SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from drivetrain.runtime.errors import CheckpointError

# Reading and writing local files past the page cache (`O_DIRECT`, Linux)


DIRECT_BLOCK = 4 << 20
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
    return huge_memory(DIRECT_BLOCK)


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
            number = start // DIRECT_BLOCK
            if number >= len(self._cached) or self._cached[number]:
                # To the end of the block only, since the next one may not be cached.
                part = buffer[: DIRECT_BLOCK - start % DIRECT_BLOCK]
                self._switch.fit(part[:0], start)
                count = os.preadv(self._descriptor, [part], start)
                self._position += count
                return count
            self._fetch(number * DIRECT_BLOCK)
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
        while self._end < start + DIRECT_BLOCK:
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
    everything = [True] * -(-size // DIRECT_BLOCK)
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
    each = DIRECT_BLOCK // mmap.PAGESIZE
    return [bool((pages[start : start + each] & 1).mean() > 0.5) for start in range(0, len(pages), each)]


BLOCK = 8 << 20
"""Bytes that are written, read and hashed at once."""

CACHE_LINE = 64
"""Bytes. torch's own memory begins at one, and kernels may round otherwise elsewhere."""

GATHER_FROM = 16 << 20
"""Bytes from which on a file is written in large aligned pieces."""

_GATHER_BLOCKS = 4
# Each costs a turn at the interpreter beside training, and what is left of the last is hashed after it is written.
_DIRECT_BLOCK = 32 << 20

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


class Sink(Protocol):
    """A file being written.

    Attributes:
        likes_blocks: Whether it is faster with much data in `aligned_block`s.
    """

    @property
    def likes_blocks(self) -> bool: ...

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    def finish(self) -> None:
        """Make the file durable and close it."""

    def abandon(self) -> None:
        """Close the file, whatever becomes of it."""


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


def dtype_name(dtype: torch.dtype) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a file's header calls by this name.

    Raises:
        ValueError: None has this name.
    """
    found = next((ours for ours, theirs in _NAMES.items() if theirs == name), None)
    if found is None:
        raise ValueError(f"{name!r} is no dtype that is known here; known are {', '.join(_NAMES.values())}")
    return getattr(torch, found)  # type: ignore[no-any-return]


def layout(
    entries: Sequence[Entry], metadata: dict[str, str] | None = None, multiple: int = CACHE_LINE
) -> tuple[bytes, list[int]]:
    """Make a file's header.

    Args:
        entries: What the file will hold, in the order that `aligned` gives where the file may be mapped.
        metadata: Text for the header.
        multiple: Bytes of which the tensors begin at a multiple in the file.

    Returns:
        The header's bytes, and where in the file each entry begins.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, position = [], 0
    for entry in entries:
        header[entry.name] = entry.described(position)
        starts.append(position)
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % multiple)
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


def joined_bytes(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors one after another, in one piece of those that lie behind each other in one memory."""
    run: list[Tensor] = []
    for tensor in tensors:
        if run and not _continues(run[-1], tensor):
            yield _bytes_of_run(run)
            run = []
        run.append(tensor)
    if run:
        yield _bytes_of_run(run)


def _continues(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor begins where another ends; neither has to be copied first."""
    both = (one, other)
    if not all(type(each) is Tensor and each.numel() > 0 and takes_bytes(each, each.dtype) for each in both):
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    return one.data_ptr() + one.numel() * one.itemsize == other.data_ptr()


def _bytes_of_run(run: Sequence[Tensor]) -> memoryview:
    if len(run) == 1:
        return bytes_of(run[0])
    storage = run[0].untyped_storage()
    start = run[0].data_ptr() - storage.data_ptr()
    size = sum(tensor.numel() * tensor.itemsize for tensor in run)
    return bytes_of(torch.empty(0, dtype=torch.uint8).set_(storage, start, (size,), (1,)))


def takes_bytes(target: Tensor, dtype: torch.dtype) -> bool:
    """Whether a file's bytes can be read straight into a tensor's memory."""
    plain = target.device.type == "cpu" and target.is_contiguous() and not target.is_neg() and not target.is_conj()
    return plain and target.dtype == dtype


def blocks_of(data: memoryview, size: int = BLOCK) -> Iterator[memoryview]:
    """Cut bytes into blocks."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


class Hasher:
    """Computes a SHA-256 in a thread of its own, since hashing and input or output both release the GIL."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._queue: Queue[tuple[memoryview, Callable[[], None] | None] | None] = Queue(maxsize=8)
        self._thread = threading.Thread(target=self._work, name="drivetrain-hash", daemon=True)
        self._thread.start()
        self.size = 0

    def add(self, data: memoryview, done: Callable[[], None] | None = None) -> None:
        """Hash these bytes next; they must stay as they are until `done` is called or the hash is read."""
        self.size += len(data)
        self._queue.put((data, done))

    def close(self) -> FileDigest:
        """Wait for the hash; may be called again."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        return FileDigest(self.size, self._digest.hexdigest())

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            data, done = item
            self._digest.update(data)
            del data
            if done is not None:
                done()


def digest_of(parts: Iterable[memoryview]) -> FileDigest:
    """The size and hash of a file of these parts, without writing it."""
    digest, size = hashlib.sha256(), 0
    for part in parts:
        digest.update(part)
        size += len(part)
    return FileDigest(size, digest.hexdigest())


def write_file(sink: Sink, parts: Iterable[memoryview], size: int = 0, known: FileDigest | None = None) -> FileDigest:
    """Write parts one after another, hashing each while it is written, and make the file durable.

    Args:
        sink: The file.
        parts: What it is to hold.
        size: How much that is about; 0 for little.
        known: What `digest_of` gave for the parts; they are not hashed again then.
    """
    hasher = Hasher() if known is None else None
    try:
        for block, done in _gathered(parts) if sink.likes_blocks and size >= GATHER_FROM else _cut(parts):
            if hasher is not None:
                hasher.add(block, done)
            sink.write(block)
            if hasher is None and done is not None:
                done()
        sink.finish()
    except BaseException:
        sink.abandon()
        raise
    finally:
        if hasher is not None:
            known = hasher.close()
    assert known is not None
    return known


_Blocks = Iterator[tuple[memoryview, Callable[[], None] | None]]


def _cut(parts: Iterable[memoryview]) -> _Blocks:
    for part in parts:
        for block in blocks_of(part):
            yield block, None


def _gathered(parts: Iterable[memoryview]) -> _Blocks:
    """Parts in aligned pieces: as they are where they lie so that a device can take them, else copied.

    There are a few blocks to copy to, each used again once it is hashed and the next one is asked for.
    """
    position = 0
    free: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(_GATHER_BLOCKS):
        free.put(aligned_block())
    block, used = free.get(), 0
    for part in parts:
        while len(part):
            if len(part) >= ALIGNMENT and is_direct(part, position + used):
                if used:
                    yield block[:used], partial(free.put, block)
                    position, block, used = position + used, free.get(), 0
                whole = part[: len(part) // ALIGNMENT * ALIGNMENT]
                for piece in blocks_of(whole, _DIRECT_BLOCK):
                    yield piece, None
                part, position = part[len(whole) :], position + len(whole)
                continue
            count = min(len(part), len(block) - used)
            copy_bytes(block[used : used + count], part[:count])
            part, used = part[count:], used + count
            if used == len(block):
                yield block, partial(free.put, block)
                position, block, used = position + used, free.get(), 0
    if used:
        yield block[:used], None


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
    """What a safetensors file holds.

    Args:
        head: The file's first bytes, at least its header.
        size: Bytes of the whole file.
        where: Its path, for messages.

    Returns:
        Where each tensor lies, in the order of the file, and the file's metadata.

    Raises:
        CheckpointError: It is no such file, is truncated, or its header contradicts itself.
    """
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
    """Bytes of a file's header after the eight that hold this number.

    Args:
        head: The file's first bytes, eight at least.
        size: Bytes of the whole file.
        where: Its path, for messages.
    """
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

    Args:
        path: The file.
        raw: The only tensor in a file that has no header and nothing else.

    Attributes:
        path: Its path.
        placed: Where each tensor lies, by name, in the order of the file.
        metadata: The text in its header.

    Raises:
        CheckpointError: It cannot be read, is truncated, or is no such file.
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
        """Refuse a file that is not as it was when it was opened, before its bytes are used.

        Raises:
            CheckpointError: It was changed, replaced or removed.
        """
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
        """Fill a buffer with a tensor's bytes, past the mapping.

        Args:
            name: The tensor.
            target: As many bytes as it has.
        """
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
        """Let the system read a part of the file ahead, meanwhile.

        Args:
            start: Its first byte.
            end: The one after its last.
        """
        start -= start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_WILLNEED"):
            for position in range(start, end, _AHEAD):
                self._map.madvise(mmap.MADV_WILLNEED, position, min(_AHEAD, end - position))

    def drop(self, start: int, end: int, cache: bool = False) -> None:
        """Take the pages of a part of the file out of this process's memory; they are read again when they are used.

        Args:
            start: Its first byte.
            end: The one after its last; pages that are only partly within stay.
            cache: Drop them from the system's cache of files too.
        """
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


def times_changed(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


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
