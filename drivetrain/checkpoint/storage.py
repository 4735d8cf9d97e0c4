"""Where checkpoints are kept: the seam between what is written and how it gets there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from typing import BinaryIO, ClassVar, Protocol, cast

from drivetrain.checkpoint.tensor_file import BLOCK, FileDigest, Sink
from drivetrain.runtime.errors import CheckpointError

MANIFEST = "MANIFEST.json"

# pathlib makes one slash of two, so a URL that went through a Path is known by one as well.
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+):/+")


class Reader(Protocol):
    """A file open for reading, unbuffered."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer, or as much of it as there is; returns how much."""

    def seek(self, offset: int, /) -> int:
        """Go on reading from there."""

    def close(self) -> None:
        """Let go of the file."""


class Storage(ABC):
    """A file system that checkpoints are written to. Paths are text."""

    # reading

    @abstractmethod
    def sizes(self, directory: str) -> dict[str, int]:
        """Every file below a directory, by its name relative to it, with its size; empty where there is none."""

    @abstractmethod
    def open(self, path: str) -> Reader:
        """Open a file for reading."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Read a small file whole."""

    @abstractmethod
    def children(self, root: str) -> list[str]:
        """Names of the directories in a directory; empty where there is none."""

    @abstractmethod
    def is_directory(self, path: str) -> bool:
        """Whether there is a directory."""

    @abstractmethod
    def modified(self, path: str) -> float:
        """When a file was last written, in seconds since the epoch; 0 where that is not known."""

    # writing

    @abstractmethod
    def begin(self, directory: str, token: str, folders: tuple[str, ...]) -> tuple[str, str]:
        """Make the place where a checkpoint is written until it is published.

        Args:
            directory: the checkpoint's final directory.
            token: tells this write from others.
            folders: the folders that it will have.

        Returns:
            That place, and what its files' names begin with in the published directory.
        """

    @abstractmethod
    def create(self, path: str) -> Sink:
        """Open a new file for writing."""

    @abstractmethod
    def publish(self, place: str, directory: str, token: str, manifest: memoryview) -> None:
        """Write the manifest, and let a finished checkpoint take the place of what has its name."""

    @abstractmethod
    def discard(self, place: str) -> None:
        """Remove a place that will not be published. Never raises."""

    @abstractmethod
    def remove(self, directory: str) -> None:
        """Remove a checkpoint that nobody needs any more; it is no checkpoint from the first moment on."""

    def touch(self, path: str) -> None:
        """Say that a write still goes on, where the storage keeps times."""

    # names

    def join(self, *parts: str) -> str:
        """Put a path together."""
        return "/".join(part for part in parts if part)

    def parent(self, path: str) -> str:
        """The directory that something is in."""
        return path.rstrip("/").rpartition("/")[0]

    def name(self, path: str) -> str:
        """The last part of a path."""
        return path.rstrip("/").rpartition("/")[2]


class LocalStorage(Storage):
    """Directories of this machine or a shared file system: written beside their name and renamed.

    All that can fail goes through the methods that begin with an underscore.
    """

    def sizes(self, directory: str) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(directory):
            for name in names:
                path = os.path.join(folder, name)
                found[os.path.relpath(path, directory).replace(os.sep, "/")] = os.lstat(path).st_size
        return found

    def open(self, path: str) -> Reader:
        return cast(Reader, open(path, "rb", buffering=0))

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def children(self, root: str) -> list[str]:
        try:
            with os.scandir(root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def modified(self, path: str) -> float:
        try:
            return os.stat(path).st_mtime
        except OSError:
            return 0.0

    def begin(self, directory: str, token: str, folders: tuple[str, ...]) -> tuple[str, str]:
        place = self._beside(directory, token, "writing")
        try:
            for folder in ("", *folders):
                self._mkdir(self.join(place, folder))
        except OSError:
            self.discard(place)
            raise
        return place, ""

    def create(self, path: str) -> Sink:
        return _LocalSink(self, path)

    def publish(self, place: str, directory: str, token: str, manifest: memoryview) -> None:
        sink = self.create(self.join(place, MANIFEST))
        try:
            sink.write(manifest)
            sink.finish()
        finally:
            sink.abandon()
        for folder, _, _ in os.walk(place, topdown=False):
            self._sync_directory(folder)
        replaced = self._beside(directory, token, "replaced") if os.path.lexists(directory) else None
        if replaced is not None:
            self._rename(directory, replaced)
        try:
            self._rename(place, directory)
        except OSError:
            self._put_back(replaced, directory)
            raise
        try:
            self._sync_directory(self.parent(directory) or ".")
        except OSError:
            os.rename(directory, place)
            self._put_back(replaced, directory)
            raise
        if replaced is not None:
            self.discard(replaced)

    def discard(self, place: str) -> None:
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place, ignore_errors=True)
        elif os.path.lexists(place):
            os.unlink(place)

    def remove(self, directory: str) -> None:
        # The name goes first: half a checkpoint must not be found under it.
        gone = self._beside(directory, str(os.getpid()), "removed")
        try:
            os.rename(directory, gone)
        except FileNotFoundError:
            return
        self.discard(gone)

    def touch(self, path: str) -> None:
        try:
            os.utime(path)
        except OSError:
            pass  # it is a hint to other machines only

    def parent(self, path: str) -> str:
        return os.path.dirname(path.rstrip("/"))

    def settle(self, path: str) -> FileDigest:
        """Make a file durable that something else has written, and hash it."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._fsync(descriptor, path)
            digest = hashlib.sha256()
            while data := os.read(descriptor, BLOCK):
                digest.update(data)
            return FileDigest(os.fstat(descriptor).st_size, digest.hexdigest())
        finally:
            os.close(descriptor)

    def _beside(self, directory: str, token: str, what: str) -> str:
        """A name beside the final one, so that a rename stays within one file system."""
        return os.path.join(self.parent(directory), f".{self.name(directory)}.{token}.{what}")

    def _put_back(self, replaced: str | None, directory: str) -> None:
        if replaced is not None:
            os.rename(replaced, directory)

    def _sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._fsync(descriptor, path)
        finally:
            os.close(descriptor)

    def _mkdir(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def _open(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def _write(self, descriptor: int, data: memoryview, path: str) -> int:
        return os.write(descriptor, data)

    def _fsync(self, descriptor: int, path: str) -> None:
        os.fsync(descriptor)

    def _rename(self, source: str, target: str) -> None:
        os.rename(source, target)


class _LocalSink:
    """A local file being written; its errors name it."""

    def __init__(self, storage: LocalStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self._descriptor: int | None = storage._open(path)

    def write(self, data: memoryview) -> None:
        assert self._descriptor is not None
        try:
            while len(data):
                data = data[self._storage._write(self._descriptor, data, self._path) :]
        except OSError as error:
            raise self._named(error) from None

    def finish(self) -> None:
        assert self._descriptor is not None
        try:
            self._storage._fsync(self._descriptor, self._path)
        except OSError as error:
            raise self._named(error) from None
        self.abandon()

    def abandon(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror or str(error), self._path)


class FsspecStorage(Storage):
    """Any file system that fsspec knows, such as `s3://` or `memory://`. None of them renames atomically.

    A checkpoint's files lie in a folder of their own for each write, `data-TOKEN`. Its `MANIFEST.json` names that
    folder and is uploaded last: the checkpoint appears, or replaces the one before, by that one file.

    Args:
        url: a path on that file system, which says which one it is.

    Raises:
        CheckpointError: fsspec, or what it needs for this file system, is not installed.
    """

    FOLDER: ClassVar[str] = "data-"

    def __init__(self, url: str) -> None:
        protocol = url.partition(":")[0]
        try:
            import fsspec

            self._system = fsspec.filesystem(protocol)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: paths of {protocol}:// cannot be used ({error}). Install `drivetrain[remote]` and the package "
                "that fsspec names for it, or give a local path."
            ) from error

    def sizes(self, directory: str) -> dict[str, int]:
        self._system.invalidate_cache()
        base = self._system._strip_protocol(directory).rstrip("/")
        found = self._system.find(base, detail=True)
        return {path[len(base) :].lstrip("/"): int(info["size"]) for path, info in found.items() if path != base}

    def open(self, path: str) -> Reader:
        return cast(Reader, self._system.open(path, "rb"))

    def read(self, path: str) -> bytes:
        with cast(BinaryIO, self._system.open(path, "rb")) as file:
            return file.read()

    def children(self, root: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(self.name(entry["name"]) for entry in found if entry["type"] == "directory")

    def is_directory(self, path: str) -> bool:
        self._system.invalidate_cache()
        return bool(self._system.isdir(path))

    def modified(self, path: str) -> float:
        try:
            return float(self._system.modified(path).timestamp())
        except (NotImplementedError, FileNotFoundError):
            return 0.0

    def begin(self, directory: str, token: str, folders: tuple[str, ...]) -> tuple[str, str]:
        folder = f"{self.FOLDER}{token}"
        for name in ("", *folders):
            self._system.makedirs(self.join(directory, folder, name), exist_ok=True)
        return self.join(directory, folder), folder

    def create(self, path: str) -> Sink:
        return _FsspecSink(cast(BinaryIO, self._system.open(path, "wb")))

    def publish(self, place: str, directory: str, token: str, manifest: memoryview) -> None:
        self._system.pipe_file(self.join(directory, MANIFEST), bytes(manifest))
        for name in self.children(directory):
            if name.startswith(self.FOLDER) and name != self.name(place):
                self.discard(self.join(directory, name))

    def discard(self, place: str) -> None:
        try:
            self._system.rm(place, recursive=True)
            if not self.sizes(self.parent(place)):
                self._system.rm(self.parent(place), recursive=True)
        except (OSError, KeyError):
            pass  # not there, or the storage is gone: then nothing can be removed

    def remove(self, directory: str) -> None:
        try:
            self._system.rm(self.join(directory, MANIFEST))
            self._system.rm(directory, recursive=True)
        except FileNotFoundError:
            pass


class _FsspecSink:
    """A remote file being written, which is there once it is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        discard = getattr(self._file, "discard", None)
        if not self._file.closed:
            if discard is not None:
                discard()
            self._file.close()


def storage_of(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage that a path is on, and the path as that storage takes it.

    Args:
        path: a local path, `file://...`, or a URL that fsspec knows, such as `s3://bucket/run` or `memory://run`.
    """
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        return LocalStorage(), os.path.abspath(os.path.expanduser(text))
    protocol, rest = match[1], text[match.end() :].rstrip("/")
    if protocol in ("file", "local"):
        return LocalStorage(), "/" + rest
    url = f"{protocol}://{rest}"
    return FsspecStorage(url), url
