"""`MANIFEST.json`: what a complete checkpoint consists of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain.checkpoint.storage import DATA_FOLDER, MANIFEST, Storage
from drivetrain.checkpoint.tensor_file import FileDigest
from drivetrain.runtime.errors import CheckpointError

FORMAT = "drivetrain.checkpoint"
VERSION = 1
WRITER_FILE = "WRITER.json"


@dataclass(frozen=True)
class Manifest:
    """What the directory of a checkpoint holds.

    Attributes:
        files: size and SHA-256 of every file but this one, by name.
        world_size: how many processes wrote it.
        step: the optimizer step at which it was written, if known.
        saved_at: when, in seconds since the epoch.
        data: the folder that the files are in; empty where they are beside the manifest.
        version: the version of the format.
    """

    files: dict[str, FileDigest]
    world_size: int
    step: int | None = None
    saved_at: float = 0.0
    data: str = ""
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """The file's content: JSON in one spelling only, with a checksum of itself, so that any damage shows."""
        content = {
            "format": FORMAT,
            "version": self.version,
            "world_size": self.world_size,
            "step": self.step,
            "saved_at": self.saved_at,
            "data": self.data,
            "files": {name: {"size": one.size, "sha256": one.sha256} for name, one in sorted(self.files.items())},
        }
        return _spelled({**content, "checksum": _checksum(content)})

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Read the file's content.

        Args:
            raw: the content.
            where: the file's path, for messages.

        Raises:
            CheckpointError: it is damaged, of another format, or of a newer version.
        """
        try:
            content = json.loads(raw)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise CheckpointError(f"{where} is not the manifest of a drivetrain checkpoint.")
            version = content["version"]
            damaged = content.pop("checksum", None) != _checksum(content)
            if damaged or raw != _spelled({**content, "checksum": _checksum(content)}):
                raise CheckpointError(f"{where} is damaged: its content does not match its checksum.")
            if version not in _READERS:
                raise CheckpointError(
                    f"{where} says version {version!r} of the format; this drivetrain reads versions up to {VERSION}. "
                    "Install the version of drivetrain that wrote it, or a later one."
                )
            return _READERS[version](content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: {error!r}.") from error


def _read_version_1(content: dict[str, Any]) -> Manifest:
    files = {name: FileDigest(one["size"], one["sha256"]) for name, one in content["files"].items()}
    return Manifest(files, content["world_size"], content["step"], content["saved_at"], content["data"], 1)


# A reader for every version ever written.
_READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {1: _read_version_1}


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """Read a checkpoint's manifest and compare the names and sizes of its files with what is there.

    Raises:
        CheckpointError: there is no complete checkpoint, or a file is missing, left over or of another size.
    """
    path = storage.join(directory, MANIFEST)
    try:
        raw = storage.read(path)
    except FileNotFoundError:
        what = "there is no such directory" if not storage.is_directory(directory) else f"{MANIFEST} is missing"
        raise CheckpointError(
            f"There is no complete checkpoint at {directory}: {what}. Give the directory that save_state or "
            "ModelCheckpoint wrote."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    manifest = Manifest.from_bytes(raw, path)
    _compare(storage, directory, manifest)
    return manifest


def _compare(storage: Storage, directory: str, manifest: Manifest) -> None:
    listed = {storage.join(manifest.data, name): digest for name, digest in manifest.files.items()}
    found = storage.sizes(directory)
    for name, digest in listed.items():
        path = storage.join(directory, name)
        if name not in found:
            raise CheckpointError(f"{path} is missing, though {MANIFEST} lists it.")
        if found[name] != digest.size:
            raise CheckpointError(f"{path} has {found[name]} bytes, but {MANIFEST} says {digest.size}.")
    for name in sorted(found):
        if name in listed or name == MANIFEST:
            continue
        if manifest.data and name.startswith(DATA_FOLDER) and not name.startswith(f"{manifest.data}/"):
            continue  # a write that was broken off, or one that goes on
        raise CheckpointError(
            f"{storage.join(directory, name)} does not belong to the checkpoint: {MANIFEST} does not list it. "
            "Remove it if you put it there."
        )


def verified_bytes(storage: Storage, directory: str, manifest: Manifest, name: str) -> bytes:
    """Read a small file of a checkpoint whole and check its SHA-256."""
    path = storage.join(directory, manifest.data, name)
    if name not in manifest.files:
        raise CheckpointError(f"{path} is missing: {MANIFEST} does not list it.")
    try:
        raw = storage.read(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    check_digest(path, FileDigest(len(raw), hashlib.sha256(raw).hexdigest()), manifest.files[name])
    return raw


def check_digest(path: str, found: FileDigest, listed: FileDigest) -> None:
    """Raise where a file is not what the manifest says."""
    if found != listed:
        raise CheckpointError(
            f"{path} is damaged: its {found.size} bytes have the SHA-256 {found.sha256[:12]}…, but {MANIFEST} says "
            f"{listed.size} bytes with {str(listed.sha256)[:12]}…."
        )


def decoded(raw: bytes, path: str) -> Any:
    """Parse a JSON file of a checkpoint."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error


def encoded(content: Any) -> bytes:
    """Spell JSON as checkpoints do; a number that JSON has no word for cannot be in it."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _spelled(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_spelled(content)).hexdigest()
