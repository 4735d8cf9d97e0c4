"""Storage of checkpoints: local and remote files, atomic publication, and removal of files that ended runs left."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import socket
import stat
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

from drivetrain.checkpoint.tree import decoded
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger

BLOCK = 1 << 20
"""Bytes that are read, hashed and written at once: few enough to stay in the processor's cache in between."""

WORKERS = min(4, os.cpu_count() or 1)
"""Number of files that are written or read in parallel."""

MANIFEST = "MANIFEST.json"
DATA_FOLDER = "data-"
"""Prefix of the folders that contain a checkpoint's files on file systems without atomic renames."""

_AS_IT_IS: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of `os.open`: child processes do not inherit the file, and Windows does not convert its line ends."""

NO_FILE = -1
"""Size that is reported for links and special files. A link could lead anywhere, so it is not followed."""


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 hash of a file."""

    size: int
    sha256: str


def blocks_of(data: memoryview, size: int = BLOCK) -> Iterator[memoryview]:
    """Yield a buffer in blocks of at most `size` bytes, without copying."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def run_parallel(jobs: Sequence[Callable[[], None]], workers: int) -> None:
    # Plain threads, because an executor accepts no work after the interpreter has begun to exit, when a background
    # save must still finish. After an error, no further job is started.
    if len(jobs) <= 1 or workers <= 1:
        for job in jobs:
            job()
        return
    waiting = list(reversed(jobs))
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                # list.pop is atomic, so the threads need no lock.
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


class Reader(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...

    def seek(self, offset: int, /) -> int: ...

    def close(self) -> None:
        """Close the file."""


class Storage(ABC):
    """Base class of the places where checkpoints are stored, such as a local disk."""

    # reading

    @abstractmethod
    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size in bytes of each file below a directory, by relative path.

        The dict is empty if the directory does not exist.

        Links and other special files have the size `NO_FILE`, and links are not followed.
        """

    @abstractmethod
    def open(self, path: str) -> Reader: ...

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the whole content of a small file."""

    @abstractmethod
    def children(self, root: str) -> list[str]:
        """Return the names, without their paths, of the subdirectories of the directory `root`.

        The list is empty if the directory does not exist.
        """

    @abstractmethod
    def is_directory(self, path: str) -> bool:
        """Return True if `path` is a directory."""

    def exists(self, path: str) -> bool:
        """Return True if there is a file or directory at `path`."""
        return self.is_directory(path)

    def is_link(self, path: str) -> bool:
        """Return True if `path` is a symbolic link."""
        return False

    def resembles_checkpoint(self, directory: str) -> bool:
        """Return True if a directory seems to contain a checkpoint, even an incomplete one."""
        names = self.sizes(directory)
        return MANIFEST in names or any("tensors/" in name for name in names)

    @abstractmethod
    def modified(self, path: str) -> float:
        """Return the modification time of a file, in seconds since 1970, or 0 if unknown."""

    # writing

    # Where to write a new checkpoint's files before it is published, and the name of their subfolder. The name is empty
    # if publishing renames the whole directory.
    @abstractmethod
    def place_for(self, directory: str, token: str) -> tuple[str, str]: ...

    @abstractmethod
    def begin(self, place: str, folders: tuple[str, ...]) -> None: ...

    @abstractmethod
    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> FileDigest: ...

    # Adds the manifest to the finished files in `place`, and replaces an older checkpoint at `directory`.
    @abstractmethod
    def publish(self, place: str, directory: str, token: str, manifest: bytes) -> None: ...

    @abstractmethod
    def discard(self, place: str) -> None:
        """Delete the directory `place` of a save that has failed. Files that cannot be deleted are left."""

    # Deletes in an order in which, after a crash, the remains do not look like a checkpoint.
    @abstractmethod
    def remove(self, directory: str) -> None: ...

    # names

    def join(self, *parts: str) -> str:
        return "/".join(part for part in parts if part)

    def parent(self, path: str) -> str:
        """Return the path of the directory that contains `path`."""
        return path.rstrip("/").rpartition("/")[0]

    def name(self, path: str) -> str:
        return path.rstrip("/").rpartition("/")[2]


class LocalStorage(Storage):
    """Storage on a local or shared file system.

    Checkpoints are written under a temporary name, then renamed.
    """

    _os: Any = os  # creates, writes and renames files; tests replace it by one that fails

    def sizes(self, directory: str) -> dict[str, int]:
        found = {}
        for folder, folders, names in os.walk(directory):
            # os.walk lists links to directories as folders, and does not follow them.
            links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
            for name in (*names, *links):
                path = os.path.join(folder, name)
                status = os.lstat(path)
                size = status.st_size if stat.S_ISREG(status.st_mode) else NO_FILE
                found[os.path.relpath(path, directory).replace(os.sep, "/")] = size
        return found

    def open(self, path: str) -> Reader:
        # Unbuffered, because callers read large blocks.
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
        """Return the paths of the regular files in a directory, except hidden ones.

        The list is empty if the directory does not exist.
        """
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
        # The tree is not listed, because a directory next to checkpoints may contain very many files.
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

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> FileDigest:
        digest, size = hashlib.sha256(), 0
        # O_EXCL, so that two processes can never write one file.
        descriptor = self._os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _AS_IT_IS, 0o666)
        try:
            for part in parts:
                for start in range(0, len(part), BLOCK):
                    block = memoryview(part)[start : start + BLOCK]
                    digest.update(block)
                    size += len(block)
                    # os.write may write only a part of a block.
                    while len(block):
                        block = block[self._os.write(descriptor, block) :]
            self._os.fsync(descriptor)
        except OSError as error:
            # Errors of os.write do not name the file, which the message needs.
            raise OSError(error.errno, error.strerror or str(error), path) from None
        finally:
            os.close(descriptor)
        return FileDigest(size, digest.hexdigest())

    def publish(self, place: str, directory: str, token: str, manifest: bytes) -> None:
        self.write(os.path.join(place, MANIFEST), [manifest])
        self.replace(place, directory, token)

    def replace(self, place: str, path: str, token: str) -> None:
        # Sync the directories before the rename, so that a crash cannot leave an incomplete checkpoint.
        for folder, _, _ in os.walk(place, topdown=False):
            self._sync_directory(folder)
        parent, name = os.path.split(path)
        # A rename cannot replace a directory that is not empty, so the old one is moved aside first.
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
            # A rename that was not synced could be lost in a crash, so it is undone.
            os.rename(path, place)
            self._put_back(replaced, path)
            raise
        if replaced is not None:
            self.discard(replaced)
            # Also remove what earlier, interrupted writes have left.
            for left in self.children(parent or "."):
                if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]+\.replaced", left):
                    self.discard(os.path.join(parent, left))

    def discard(self, place: str) -> None:
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place, ignore_errors=True)
        elif os.path.lexists(place):
            os.unlink(place)

    def remove(self, directory: str) -> None:
        # Rename first, so that an interrupted removal leaves no incomplete checkpoint under this name.
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
        if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open directories
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Checkpoints on file systems of fsspec, such as object stores


class FsspecStorage(Storage):
    """Storage on a file system of fsspec, such as `s3://`.

    Nothing can be renamed atomically there.

    Each save writes into a new folder `data-TOKEN`. The checkpoint's `MANIFEST.json` names this folder and is uploaded
    last. This single file makes the checkpoint appear, or replaces an older one.
    """

    def __init__(self, url: str) -> None:
        protocol = url.partition(":")[0]
        try:
            import fsspec

            self._system = fsspec.filesystem(protocol)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"Cannot use {url}, because {protocol}:// is not available ({error}). Install `drivetrain[remote]` and "
                "the package that fsspec needs for this protocol, or use a local path."
            ) from error

    def sizes(self, directory: str) -> dict[str, int]:
        self._system.invalidate_cache()
        # fsspec lists paths without their protocol.
        base = self._system._strip_protocol(directory).rstrip("/")
        # Without the invalidated cache, files that other processes have written could be missing.
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

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> FileDigest:
        digest, size = hashlib.sha256(), 0
        file = cast(BinaryIO, self._system.open(path, "wb"))
        try:
            for part in parts:
                for block in blocks_of(memoryview(part)):
                    digest.update(block)
                    size += file.write(block)
        except BaseException:
            # Abort an upload, so that no part of the file becomes visible.
            if hasattr(file, "discard"):
                file.discard()
            file.close()
            raise
        file.close()  # many storages make a file visible only when it is closed
        return FileDigest(size, digest.hexdigest())

    def publish(self, place: str, directory: str, token: str, manifest: bytes) -> None:
        # This upload replaces an older checkpoint, whose data folder is removed afterwards.
        self._system.pipe_file(self.join(directory, MANIFEST), manifest)
        for name in self.children(directory):
            if name.startswith(DATA_FOLDER) and name != self.name(place):
                self.discard(self.join(directory, name))

    def discard(self, place: str) -> None:
        try:
            self._system.rm(place, recursive=True)
            # Some file systems keep the empty directory of a checkpoint.
            if not self.sizes(self.parent(place)):
                self._system.rm(self.parent(place), recursive=True)
        except (OSError, KeyError):
            pass  # it does not exist, or the storage is not available

    def remove(self, directory: str) -> None:
        try:
            # Without its manifest, the rest is not recognized as a checkpoint.
            self._system.rm(self.join(directory, MANIFEST))
            self._system.rm(directory, recursive=True)
        except FileNotFoundError:
            pass


# Which storage a path or URL is on


# pathlib turns `s3://` into `s3:/`, so a single slash is accepted too.
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+):/+")


def storage_of(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return the storage for a path or URL, and the path within that storage."""
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        return LocalStorage(), os.path.abspath(os.path.expanduser(text))
    protocol, rest = match[1], text[match.end() :].rstrip("/")
    if protocol in ("file", "local"):
        return LocalStorage(), "/" + rest

    url = f"{protocol}://{rest}"
    return FsspecStorage(url), url


# Identity of writing processes, which tells files of ended runs from those of running ones


logger = get_logger(__name__)

WRITER_FILE = "WRITER.json"

OTHER_HOST_PATIENCE = 24 * 3600.0
"""Seconds after which a write counts as abandoned if it is from another machine, whose processes are not visible."""

UNRECORDED_PATIENCE = 600.0
"""Seconds after which a write without a `WRITER.json` counts as abandoned. A save writes this file first."""

FILE_PATIENCE = 3600.0
"""Seconds after which a temporary file counts as abandoned if its name shows no process of this machine."""

_TOKEN_LENGTH = 36

_LEFT = re.compile(r"^\.(?P<name>.+)\.(?P<token>[0-9a-f]+)\.(?P<what>writing|replaced|removed)$")

_LEFT_FILE = re.compile(r"^\.(?P<name>.+)\.(?P<token>[0-9a-f]{12,})\.(?P<what>writing|replaced|link)$")


@functools.cache
def writer_of(pid: int) -> dict[str, Any]:
    # Identifies a process on all machines, so that another process can tell later if it still runs.
    since_boot = started_since_boot()
    return {"host": _host(), "pid": pid, "started": started_at() if since_boot is None else since_boot}


def writer_token() -> str:
    # Part of a temporary file's name, so that other processes can find out whether its writer still runs.
    started = round((started_since_boot() or 0.0) * 100)
    # 8 characters for the machine, 8 for the process id, 12 for the start time, and 8 random ones.
    return f"{_host_hash()}{os.getpid():08x}{started:012x}{uuid.uuid4().hex[:8]}"


def clean_stale(root: str) -> list[str]:
    """Clean up what interrupted saves have left in a directory.

    Unfinished checkpoints are removed, and those that were moved aside are restored.

    Args:
        root: The directory that contains the checkpoints, on a local or shared file system.

    Returns:
        The paths that were removed or restored.
    """
    found = []
    for path, match in _left_in(root):
        if _is_in_use(path, match):
            continue
        final = os.path.join(root, match["name"])
        try:
            if match["what"] == "replaced" and not os.path.lexists(final):
                os.rename(path, final)
                logger.warning(f"A run ended while it replaced {final}. The previous checkpoint is restored.")
            else:
                LocalStorage().discard(path)
        except OSError:
            continue  # another process was faster, or nothing may be written here
        found.append(path)
    return found


def replaced_beside(directory: str) -> str | None:
    # An interrupted save may have moved the older checkpoint aside.
    parent, name = os.path.split(directory)
    if os.path.lexists(directory):
        return None
    for path, match in _left_in(parent):
        if match["name"] == name and match["what"] == "replaced" and os.path.isfile(os.path.join(path, MANIFEST)):
            return path
    return None


def _left_in(root: str) -> list[tuple[str, re.Match[str]]]:
    try:
        with os.scandir(root) as entries:
            kinds = [(each, _LEFT if each.is_dir(follow_symlinks=False) else _LEFT_FILE) for each in entries]
    except OSError:
        return []
    left = [(each.path, match) for each, kind in kinds if (match := kind.match(each.name))]
    # The newest checkpoint comes first.
    return sorted(left, key=lambda one: (-LocalStorage().modified(os.path.join(one[0], MANIFEST)), one[0]))


def _is_in_use(path: str, match: re.Match[str]) -> bool:
    what, (root, _) = match["what"], os.path.split(path)
    if match.re is _LEFT_FILE:
        lives = _is_token_alive(match["token"])
        return _is_recent(path, FILE_PATIENCE) if lives is None else lives
    if what == "replaced":
        # A save that is still replacing has the new checkpoint under its temporary or its final name.
        # The temporary name is checked first: a rename in between then makes the final name exist.
        places = os.path.join(root, f".{match['name']}.{match['token']}.writing"), os.path.join(root, match["name"])
        new = next((one for one in places if os.path.isdir(one)), None)
        return new is not None and _is_alive(new)
    return what == "writing" and _is_alive(path)


def _is_alive(place: str) -> bool:
    path = os.path.join(place, WRITER_FILE)
    try:
        writer = decoded(LocalStorage().read(path), path)
        host, pid, started = writer["host"], int(writer["pid"]), float(writer["started"])
    except (OSError, CheckpointError, KeyError, TypeError, ValueError):
        return _is_recent(place, UNRECORDED_PATIENCE)
    if host != _host():
        return _is_recent(path, OTHER_HOST_PATIENCE)
    return is_alive(pid, started)


def _is_token_alive(token: str) -> bool | None:
    # None means unknown, for example because the process ran on another machine.
    if len(token) != _TOKEN_LENGTH or token[:8] != _host_hash():
        return None
    started = int(token[16:28], 16) / 100
    return is_alive(int(token[8:16], 16), started) if started else None


def _host_hash() -> str:
    return hashlib.sha256(_host().encode()).hexdigest()[:8]


def _is_recent(path: str, patience: float) -> bool:
    return time.time() - LocalStorage().modified(path) < patience


def _host() -> str:
    # A process id is unique only within a container on one boot of a machine.
    parts = [socket.gethostname(), boot_id()]
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux
    return " ".join(filter(None, parts))


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def started_since_boot(pid: int | str = "self") -> float | None:
    """Return when a process started, in seconds since the machine's boot.

    Unlike a time of day, this value does not change when the clock is set.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            _, _, after_name = file.read().rpartition(b")")  # the program's name may contain spaces and parentheses
    except OSError:
        return None
    # The start time in clock ticks is field 22 of the file, and the name is field 2.
    return int(after_name.split()[19]) / os.sysconf("SC_CLK_TCK")


def started_at() -> float:
    """Return the start time of this process, in seconds since 1970."""
    since_boot = started_since_boot()
    if since_boot is not None:
        return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot, 2)  # a tick is a hundredth
    import psutil

    return float(psutil.Process().create_time())


def is_alive(pid: int, started: float) -> bool:
    # `started` is a value of `started_at` or `started_since_boot`. It tells the process from a later one with its id.
    import psutil

    try:
        process = psutil.Process(pid)
        if started < _TIMES_OF_DAY:
            same = started_since_boot(pid) == started
        else:
            same = abs(process.create_time() - started) < 2.0  # clocks are adjusted
        # A zombie has ended, although its process id is still in use.
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True  # a process of another user, which is running
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


_TIMES_OF_DAY = 1e9
"""Larger values are seconds since 1970, because no machine has run for 30 years."""
