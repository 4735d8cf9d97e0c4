"""Where checkpoints are kept: the seam between what is written and how it gets there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, BinaryIO, Protocol, cast

from drivetrain.checkpoint.safetensors_file import BLOCK, FileDigest, blocks_of
from drivetrain.runtime.errors import CheckpointError

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
    """A file system that checkpoints are written to. Paths are text."""

    # reading

    @abstractmethod
    def sizes(self, directory: str) -> dict[str, int]:
        """Every file below a directory, by its name relative to it, with its size; empty where there is none.

        A link, or whatever else is no plain file, has the size `NO_FILE`, and what it leads to is left out.
        """

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
        """Choose where a checkpoint is written until it is published."""

    @abstractmethod
    def begin(self, place: str, folders: tuple[str, ...]) -> None:
        """Make a place and the folders in it, unless another process was faster."""

    @abstractmethod
    def write(self, path: str, parts: Iterable[memoryview]) -> FileDigest:
        """Write a new file and make it durable. Returns its size and hash."""

    @abstractmethod
    def publish(self, place: str, directory: str, token: str, manifest: memoryview) -> None:
        """Write the manifest, and let a finished checkpoint take the place of what has its name."""

    @abstractmethod
    def discard(self, place: str) -> None:
        """Remove a place that will not be published. Never raises."""

    @abstractmethod
    def remove(self, directory: str) -> None:
        """Remove a checkpoint that is not needed any more; it is no checkpoint from the first moment on."""

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
    """Directories of this machine or a shared file system: written beside their name and renamed."""

    def __init__(self, system: Any = os) -> None:
        self._os = system

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
        # Beside the final name, so that a rename stays within one file system.
        parent, name = os.path.split(directory)
        return os.path.join(parent, f".{name}.{token}.writing"), ""

    def begin(self, place: str, folders: tuple[str, ...]) -> None:
        for folder in ("", *folders):
            self._os.makedirs(os.path.join(place, folder), exist_ok=True)

    def write(self, path: str, parts: Iterable[memoryview]) -> FileDigest:
        digest, size = hashlib.sha256(), 0
        descriptor = self._os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _AS_IT_IS, 0o666)
        try:
            for part in parts:
                for block in blocks_of(part):
                    digest.update(block)
                    size += len(block)
                    while len(block):
                        block = block[self._os.write(descriptor, block) :]
            self._os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), path) from None
        finally:
            os.close(descriptor)
        return FileDigest(size, digest.hexdigest())

    def publish(self, place: str, directory: str, token: str, manifest: memoryview) -> None:
        self.write(os.path.join(place, MANIFEST), [manifest])
        self.replace(place, directory, token)

    def replace(self, place: str, path: str, token: str) -> None:
        """Let what is complete take the place of what has its name, if anything has, which comes back on an error."""
        for folder, _, _ in os.walk(place, topdown=False):
            self._sync_directory(folder)
        parent, name = os.path.split(path)
        replaced = os.path.join(parent, f".{name}.{token}.replaced") if os.path.lexists(path) else None
        if replaced is not None:
            self._os.rename(path, replaced)
        try:
            self._os.rename(place, path)
        except OSError:
            self._put_back(replaced, path)
            raise
        try:
            self._sync_directory(parent or ".")
        except OSError:
            os.rename(path, place)
            self._put_back(replaced, path)
            raise
        if replaced is not None:
            self.discard(replaced)
            # And what earlier writes left that failed on their way back as well.
            for left in self.children(parent or "."):
                if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]+\.replaced", left):
                    self.discard(os.path.join(parent, left))

    def discard(self, place: str) -> None:
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place, ignore_errors=True)
        elif os.path.lexists(place):
            os.unlink(place)

    def remove(self, directory: str) -> None:
        # The name goes first: half a checkpoint must not be found under it.
        parent, name = os.path.split(directory)
        gone = os.path.join(parent, f".{name}.{os.getpid()}.removed")
        try:
            os.rename(directory, gone)
        except FileNotFoundError:
            return
        self.discard(gone)

    def parent(self, path: str) -> str:
        return os.path.dirname(path.rstrip("/"))

    def settle(self, path: str) -> FileDigest:
        """Make a file durable that something else has written, and hash it."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._os.fsync(descriptor)
            digest = hashlib.sha256()
            while data := os.read(descriptor, BLOCK):
                digest.update(data)
            return FileDigest(os.fstat(descriptor).st_size, digest.hexdigest())
        finally:
            os.close(descriptor)

    def _put_back(self, replaced: str | None, directory: str) -> None:
        if replaced is not None:
            os.rename(replaced, directory)

    def _sync_directory(self, path: str) -> None:
        if not hasattr(os, "O_DIRECTORY"):  # Windows opens none
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Checkpoints on file systems of fsspec, such as object stores


class FsspecStorage(Storage):
    """Any file system of fsspec, such as `s3://` or `memory://`. None of them renames atomically.

    A checkpoint's files lie in a folder of their own for each write, `data-TOKEN`. Its `MANIFEST.json` names that
    folder and is uploaded last: the checkpoint appears, or replaces the one before, by that one file.
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

    def place_for(self, directory: str, token: str) -> tuple[str, str]:
        return self.join(directory, f"{DATA_FOLDER}{token}"), f"{DATA_FOLDER}{token}"

    def begin(self, place: str, folders: tuple[str, ...]) -> None:
        for name in ("", *folders):
            self._system.makedirs(self.join(place, name), exist_ok=True)

    def write(self, path: str, parts: Iterable[memoryview]) -> FileDigest:
        digest, size = hashlib.sha256(), 0
        file = cast(BinaryIO, self._system.open(path, "wb"))
        try:
            for part in parts:
                for block in blocks_of(part):
                    digest.update(block)
                    size += file.write(block)
        except BaseException:
            if hasattr(file, "discard"):
                file.discard()
            file.close()
            raise
        file.close()  # only now it is there
        return FileDigest(size, digest.hexdigest())

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


# Which storage a path or URL is on


# pathlib makes one slash of two, so a URL that went through a Path is known by one as well.
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+):/+")


def storage_of(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage that a path is on, and the path as that storage takes it."""
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        return LocalStorage(), os.path.abspath(os.path.expanduser(text))
    protocol, rest = match[1], text[match.end() :].rstrip("/")
    if protocol in ("file", "local"):
        return LocalStorage(), "/" + rest

    url = f"{protocol}://{rest}"
    return FsspecStorage(url), url
