"""Checkpoints on file systems of fsspec, such as object stores."""

from __future__ import annotations

from typing import BinaryIO, cast

from drivetrain.checkpoint.storage import DATA_FOLDER, MANIFEST, Reader, Storage
from drivetrain.checkpoint.tensor_file import Sink
from drivetrain.runtime.errors import CheckpointError


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
