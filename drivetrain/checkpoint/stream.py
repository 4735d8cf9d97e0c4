"""Reading a checkpoint's files in one pass, with their hashes computed on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from drivetrain.checkpoint.errors import DamagedCheckpointError
from drivetrain.checkpoint.manifest import check_digest
from drivetrain.checkpoint.storage import Reader, Storage
from drivetrain.checkpoint.tensor_file import BLOCK, FileDigest, Hasher, blocks_of


class FileStream:
    """Reads parts of a file in ascending order; hashes all of it on the way, or skips what is not asked for."""

    def __init__(self, storage: Storage, path: str, listed: FileDigest, hashes: bool, once: bool = False) -> None:
        self._path, self._listed = path, listed
        self._position = 0
        try:
            self._file: Reader = storage.open(path, once)
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from error
        self._hasher = Hasher() if hashes else None
        self._free: SimpleQueue[memoryview] | None = None

    def __enter__(self) -> FileStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        try:
            if kind is None and self._hasher is not None:
                self._skip_to(self._listed.size)
                check_digest(self._path, self._hasher.close(), self._listed)
        finally:
            self._file.close()
            if self._hasher is not None:
                self._hasher.close()

    def read(self, start: int, target: memoryview) -> None:
        """Fill a buffer from a position on."""
        self._skip_to(start)
        for block in blocks_of(target):
            self._fill(block)
            if self._hasher is not None:
                self._hasher.add(block)

    def _skip_to(self, position: int) -> None:
        if position == self._position:
            return
        if self._hasher is None:
            self._file.seek(position)
            self._position = position
            return
        free = self._scratch()
        while self._position < position:
            buffer = free.get()
            block = buffer[: min(len(buffer), position - self._position)]
            self._fill(block)
            self._hasher.add(block, partial(free.put, buffer))

    def _scratch(self) -> SimpleQueue[memoryview]:
        """Buffers for what is only hashed, each back here once it is."""
        if self._free is None:
            self._free = SimpleQueue()
            for _ in range(3):
                self._free.put(memoryview(bytearray(min(BLOCK, self._listed.size))))
        return self._free

    def _fill(self, block: memoryview) -> None:
        size = len(block)
        while len(block):
            try:
                count = self._file.readinto(block)
            except OSError as error:
                raise DamagedCheckpointError(f"{self._path} cannot be read: {error}.") from error
            if not count:
                raise DamagedCheckpointError(f"{self._path} ends too early: it should have {self._listed.size} bytes.")
            block = block[count:]
        self._position += size


def read_ranges(
    storage: Storage,
    path: str,
    listed: FileDigest,
    ranges: Sequence[tuple[int, int]],
    take: Callable[[memoryview], None],
) -> None:
    """Read ranges (start, length) of a file, unhashed, a block at a time through one buffer.

    Args:
        storage: Where the file is.
        path: The file.
        listed: Its size and hash in the manifest.
        ranges: What to read.
        take: Is given each block, which is overwritten by the next.
    """
    buffer = memoryview(bytearray(BLOCK))
    with FileStream(storage, path, listed, hashes=False) as stream:
        for start, length in ranges:
            for done in range(0, length, BLOCK):
                block = buffer[: min(BLOCK, length - done)]
                stream.read(start + done, block)
                take(block)


def verify_file(storage: Storage, path: str, listed: FileDigest, once: bool = False) -> None:
    """Hash a whole file and compare."""
    with FileStream(storage, path, listed, hashes=True, once=once):
        pass
