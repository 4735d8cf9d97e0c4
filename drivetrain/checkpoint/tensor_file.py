"""Files in safetensors' layout, written and read without a second copy of what they hold.

Layout: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Queue, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from drivetrain.checkpoint.direct import ALIGNMENT, aligned_block, copy_bytes, is_direct

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
