"""Where checkpoints are kept: the seam between what is written and how it gets there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from typing import BinaryIO, Protocol, cast

from drivetrain.checkpoint.safetensors_file import BLOCK, DirectReader, DirectSwitch, FileDigest, Sink
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

MANIFEST = "MANIFEST.json"
DATA_FOLDER = "data-"
"""What the folders begin with that a checkpoint's files lie in where nothing can be renamed."""

_AS_IT_IS: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Opens a file for this process alone, and on Windows without changing its line ends."""

NO_FILE = -1
"""Stands for the size of what is no plain file, such as a link: it may lead anywhere."""


class Reader(Protocol):
    """A file open for reading, unbuffered."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer, or as much of it as there is; returns how much."""

    def seek(self, offset: int, /) -> int:
        """Continue reading from there."""

    def close(self) -> None:
        """Close the file."""


class Storage(ABC):
    """A file system that checkpoints are written to. Paths are text.

    Attributes:
        has_links: Whether `link` can give a file a second name.
    """

    has_links = False

    # reading

    @abstractmethod
    def sizes(self, directory: str) -> dict[str, int]:
        """Every file below a directory, by its name relative to it, with its size; empty where there is none.

        A link, or whatever else is no plain file, has the size `NO_FILE`, and what it leads to is left out.
        """

    @abstractmethod
    def open(self, path: str, once: bool = False) -> Reader:
        """Open a file for reading.

        Args:
            path: The file.
            once: Whether it is not soon read again here, so that there is no use in caching it.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Read a small file whole."""

    @abstractmethod
    def children(self, root: str) -> list[str]:
        """Names of the directories in a directory; empty where there is none."""

    @abstractmethod
    def is_directory(self, path: str) -> bool:
        """Whether there is a directory."""

    def exists(self, path: str) -> bool:
        """Whether there is anything of this name."""
        return self.is_directory(path)

    def is_link(self, path: str) -> bool:
        """Whether there is a symbolic link of this name."""
        return False

    def resembles_checkpoint(self, directory: str) -> bool:
        """Whether a directory looks like a checkpoint, whole or not."""
        names = self.sizes(directory)
        return MANIFEST in names or any("tensors/" in name for name in names)

    @abstractmethod
    def modified(self, path: str) -> float:
        """When a file was last written, in seconds since the epoch; 0 where that is not known."""

    # writing

    @abstractmethod
    def place_for(self, directory: str, token: str) -> tuple[str, str]:
        """Choose where a checkpoint is written until it is published.

        Args:
            directory: The checkpoint's final directory.
            token: Distinguishes this write from others.

        Returns:
            That place, and what its files' names begin with in the published directory.
        """

    @abstractmethod
    def begin(self, place: str, folders: tuple[str, ...]) -> None:
        """Make a place and the folders in it, unless another process was faster."""

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
        """Remove a checkpoint that is not needed any more; it is no checkpoint from the first moment on."""

    def touch(self, path: str) -> None:
        """Mark a write as alive, where the storage keeps times."""

    def link(self, source: str, target: str, size: int, manifest: str) -> bool:
        """Give a file of a complete checkpoint a second name, so that it stays when either goes.

        Args:
            source: The file.
            target: Its second name.
            size: How many bytes it should have.
            manifest: That of its checkpoint; a file written to later is not linked.

        Returns:
            Whether it has the name now. Where it has not, there is nothing of that name.
        """
        return False

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

    has_links = True

    def sizes(self, directory: str) -> dict[str, int]:
        found = {}
        for folder, folders, names in os.walk(directory):
            links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
            for name in (*names, *links):
                path = os.path.join(folder, name)
                status = os.lstat(path)
                size = status.st_size if stat.S_ISREG(status.st_mode) else NO_FILE
                found[os.path.relpath(path, directory).replace(os.sep, "/")] = size
        return found

    def open(self, path: str, once: bool = False) -> Reader:
        return DirectReader(path) if once and hasattr(os, "preadv") else cast(Reader, open(path, "rb", buffering=0))

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def children(self, root: str) -> list[str]:
        try:
            with os.scandir(root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, root: str) -> list[str]:
        """Paths of the plain files in a directory, without hidden ones; empty where there is none."""
        try:
            with os.scandir(root) as entries:
                plain = (each for each in entries if each.is_file(follow_symlinks=False))
                return sorted(each.path for each in plain if not each.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def resembles_checkpoint(self, directory: str) -> bool:
        # Anything may be beside checkpoints, and much of it.
        return self.exists(self.join(directory, MANIFEST)) or self.is_directory(self.join(directory, "tensors"))

    def modified(self, path: str) -> float:
        try:
            return os.stat(path).st_mtime
        except OSError:
            return 0.0

    def place_for(self, directory: str, token: str) -> tuple[str, str]:
        return self._beside(directory, token, "writing"), ""

    def begin(self, place: str, folders: tuple[str, ...]) -> None:
        for folder in ("", *folders):
            self._mkdir(self.join(place, folder))

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
            # And what earlier writes left that failed on their way back as well.
            parent, old = self.parent(directory) or ".", re.escape(self.name(directory))
            for name in self.children(parent):
                if re.fullmatch(rf"\.{old}\.[0-9a-f]+\.replaced", name):
                    self.discard(self.join(parent, name))

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

    def link(self, source: str, target: str, size: int, manifest: str) -> bool:
        try:
            latest = os.stat(manifest).st_mtime_ns
            self._link(source, target)
        except FileNotFoundError:
            return False  # the checkpoint was removed meanwhile
        except OSError as error:
            # Another device, no permission, no such thing as links; where writing fails too, that is the error.
            self.discard(target)  # a network's second attempt fails where the first one worked unheard
            logger.warning_once(
                f"What did not change since the checkpoint before is written again, as files of "
                f"{os.path.dirname(manifest)} cannot be linked: {error.strerror}."
            )
            return False
        status = os.lstat(target)
        if stat.S_ISREG(status.st_mode) and status.st_size == size and status.st_mtime_ns <= latest:
            return True
        os.unlink(target)
        return False

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
        if not hasattr(os, "O_DIRECTORY"):  # Windows opens none
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._fsync(descriptor, path)
        finally:
            os.close(descriptor)

    def _mkdir(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def _open(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _AS_IT_IS, 0o666)

    def _write(self, descriptor: int, data: memoryview, path: str) -> int:
        return os.write(descriptor, data)

    def _fsync(self, descriptor: int, path: str) -> None:
        os.fsync(descriptor)

    def _link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def _rename(self, source: str, target: str) -> None:
        os.rename(source, target)


class _LocalSink:
    """A local file being written; its errors name it."""

    likes_blocks = True

    def __init__(self, storage: LocalStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self._descriptor: int | None = storage._open(path)
        self._switch = DirectSwitch(self._descriptor)
        self._position = 0

    def write(self, data: memoryview) -> None:
        assert self._descriptor is not None
        try:
            while len(data):
                count = self._write_some(self._descriptor, data)
                self._position += count
                data = data[count:]
        except OSError as error:
            raise self._named(error) from None

    def _write_some(self, descriptor: int, data: memoryview) -> int:
        part = self._switch.fit(data, self._position)
        try:
            return self._storage._write(descriptor, part, self._path)
        except OSError as error:
            if not self._switch.refused(error):
                raise
        return self._storage._write(descriptor, data, self._path)

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


# Checkpoints on file systems of fsspec, such as object stores


class FsspecStorage(Storage):
    """Any file system of fsspec, such as `s3://` or `memory://`. None of them renames atomically.

    A checkpoint's files lie in a folder of their own for each write, `data-TOKEN`. Its `MANIFEST.json` names that
    folder and is uploaded last: the checkpoint appears, or replaces the one before, by that one file.

    Args:
        url: A path on that file system, which names it.

    Raises:
        CheckpointError: Fsspec, or what it needs for this file system, is not installed.
    """

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

    def open(self, path: str, once: bool = False) -> Reader:
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

    def place_for(self, directory: str, token: str) -> tuple[str, str]:
        return self.join(directory, f"{DATA_FOLDER}{token}"), f"{DATA_FOLDER}{token}"

    def begin(self, place: str, folders: tuple[str, ...]) -> None:
        for name in ("", *folders):
            self._system.makedirs(self.join(place, name), exist_ok=True)

    def create(self, path: str) -> Sink:
        return _FsspecSink(cast(BinaryIO, self._system.open(path, "wb")))

    def publish(self, place: str, directory: str, token: str, manifest: memoryview) -> None:
        self._system.pipe_file(self.join(directory, MANIFEST), bytes(manifest))
        for name in self.children(directory):
            if name.startswith(DATA_FOLDER) and name != self.name(place):
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

    likes_blocks = False

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


# Which storage a path or URL is on


# pathlib makes one slash of two, so a URL that went through a Path is known by one as well.
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+):/+")


def storage_of(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage that a path is on, and the path as that storage takes it.

    Args:
        path: A local path, `file://...`, or a URL of a file system of fsspec, such as `s3://bucket/run` or `memory://run`.
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
