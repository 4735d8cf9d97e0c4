"""`MANIFEST.json`: what a complete checkpoint consists of."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain.checkpoint.errors import DamagedCheckpointError
from drivetrain.checkpoint.storage import DATA_FOLDER, MANIFEST, NO_FILE, Storage
from drivetrain.checkpoint.tensor_file import FileDigest
from drivetrain.runtime.errors import CheckpointError

FORMAT = "drivetrain.checkpoint"
VERSION = 1
WRITER_FILE = "WRITER.json"


@dataclass(frozen=True)
class Manifest:
    """What the directory of a checkpoint holds.

    Attributes:
        files: Size and SHA-256 of every file but this one, by name.
        world_size: How many processes wrote it.
        step: The optimizer step at which it was written, if known.
        saved_at: When, in seconds since the epoch.
        data: The folder that the files are in; empty where they are beside the manifest.
        finite_loss: Whether every loss since the save before was finite; without, the weights may be spoilt.
        version: The version of the format.
    """

    files: dict[str, FileDigest]
    world_size: int
    step: int | None = None
    saved_at: float = 0.0
    data: str = ""
    finite_loss: bool = True
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
            "finite_loss": self.finite_loss,
            "files": {name: {"size": one.size, "sha256": one.sha256} for name, one in sorted(self.files.items())},
        }
        return _spelled({**content, "checksum": _checksum(content)})

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Read the file's content.

        Args:
            raw: The content.
            where: The file's path, for messages.

        Raises:
            CheckpointError: It is damaged, of another format, or of a newer version.
        """
        try:
            content = json.loads(raw)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise DamagedCheckpointError(f"{where} is not the manifest of a drivetrain checkpoint.")
            version = content["version"]
            damaged = content.pop("checksum", None) != _checksum(content)
            if damaged or raw != _spelled({**content, "checksum": _checksum(content)}):
                raise DamagedCheckpointError(f"{where} is damaged: its content does not match its checksum.")
            if version not in _READERS:
                raise CheckpointError(
                    f"{where} says version {version!r} of the format; this drivetrain reads versions up to {VERSION}. "
                    "Install the version of drivetrain that wrote it, or a later one."
                )
            return _READERS[version](content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = error if type(error) is ValueError else repr(error)
            raise DamagedCheckpointError(f"{where} is damaged: {reason}.") from error


def _read_version_1(content: dict[str, Any]) -> Manifest:
    files = {name: FileDigest(one["size"], one["sha256"]) for name, one in content["files"].items()}
    for name, digest in files.items():
        if not _is_inside(name):
            raise ValueError(f"it lists {name!r}, which is no name of a file within the checkpoint")
        if not (_is_count(digest.size) and isinstance(digest.sha256, str) and _SHA256.fullmatch(digest.sha256)):
            raise ValueError(f"{name} has no size and SHA-256 there")
    world_size, step, saved_at, data = (content[key] for key in ("world_size", "step", "saved_at", "data"))
    if data != "" and not (isinstance(data, str) and _DATA.fullmatch(data)):
        raise ValueError(f"it names {data!r} as the folder of its files")
    fits = _is_count(world_size) and world_size > 0 and (step is None or _is_count(step))
    if not fits or not (_is_count(saved_at) or (type(saved_at) is float and math.isfinite(saved_at))):
        raise ValueError(f"world_size={world_size!r}, step={step!r} or saved_at={saved_at!r} is not what it should be")
    return Manifest(files, world_size, step, saved_at, data, content.get("finite_loss", True) is True, version=1)


_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATA = re.compile(rf"{DATA_FOLDER}[0-9a-zA-Z]+")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_inside(name: str) -> bool:
    """Whether this is the name of a file within a directory, as checkpoints spell it, wherever it is."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


# A reader for every version ever written.
_READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {1: _read_version_1}


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """Read a checkpoint's manifest and compare the names and sizes of its files with what is there.

    Raises:
        CheckpointError: There is no complete checkpoint, or a file is missing, left over or of another size.
    """
    path = storage.join(directory, MANIFEST)
    found = storage.sizes(directory)
    try:
        if found.get(MANIFEST) == NO_FILE:
            raise DamagedCheckpointError(f"{path} is a link or a device, and no checkpoint holds such.")
        raw = storage.read(path)
    except FileNotFoundError:
        what = "there is no such directory" if not storage.is_directory(directory) else f"{MANIFEST} is missing"
        raise DamagedCheckpointError(
            f"There is no complete checkpoint at {directory}: {what}. Give the directory that save_state or "
            "ModelCheckpoint wrote."
        ) from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from error
    manifest = Manifest.from_bytes(raw, path)
    _compare(storage, directory, manifest, found)
    return manifest


def _compare(storage: Storage, directory: str, manifest: Manifest, found: dict[str, int]) -> None:
    listed = {storage.join(manifest.data, name): digest for name, digest in manifest.files.items()}
    for name in sorted(found):
        if found[name] == NO_FILE:
            raise DamagedCheckpointError(
                f"{storage.join(directory, name)} is a link or a device, and no checkpoint holds such. Put the file "
                "that it leads to there, or remove it."
            )
    for name, digest in listed.items():
        path = storage.join(directory, name)
        if name not in found:
            raise DamagedCheckpointError(f"{path} is missing, though {MANIFEST} lists it.")
        if found[name] != digest.size:
            raise DamagedCheckpointError(f"{path} has {found[name]} bytes, but {MANIFEST} says {digest.size}.")
    for name in sorted(found):
        if name in listed or name == MANIFEST:
            continue
        if manifest.data and name.startswith(DATA_FOLDER) and not name.startswith(f"{manifest.data}/"):
            continue  # a write that was broken off, or one under way
        raise DamagedCheckpointError(
            f"{storage.join(directory, name)} does not belong to the checkpoint: {MANIFEST} does not list it. "
            "Remove it if you put it there."
        )


def has_manifest(storage: Storage, directory: str) -> bool:
    """Whether a directory has a manifest of ours, whole or not.

    Args:
        storage: Where it is.
        directory: The directory.
    """
    path = storage.join(directory, MANIFEST)
    try:
        content = decoded(storage.read(path), path)
    except (OSError, CheckpointError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def check_is_checkpoint(storage: Storage, directory: str, what: str) -> None:
    """Refuse a directory without a manifest of ours, whole or not: it holds something else.

    Args:
        storage: Where it is.
        directory: The directory.
        what: What does not happen to it, for the message.

    Raises:
        CheckpointError: It is no checkpoint.
    """
    if not has_manifest(storage, directory):
        raise CheckpointError(f"{directory} {what}: it is no checkpoint, as it has no {MANIFEST} of drivetrain's.")


def check_replaceable(storage: Storage, directory: str) -> None:
    """Refuse to let a checkpoint take the place of something that is none; nothing and an empty directory are.

    Raises:
        CheckpointError: There is something else.
    """
    if not storage.exists(directory) or storage.is_link(directory):
        return
    try:
        check_is_checkpoint(storage, directory, "is not replaced by a checkpoint")
    except CheckpointError:
        # A remote write that was broken off leaves a folder of data.
        is_free = all(name.startswith(DATA_FOLDER) for name in storage.sizes(directory))
        if not (is_free and storage.is_directory(directory)):
            raise


def verified_bytes(storage: Storage, directory: str, manifest: Manifest, name: str) -> bytes:
    """Read a small file of a checkpoint whole and check its SHA-256."""
    path = storage.join(directory, manifest.data, name)
    if name not in manifest.files:
        raise DamagedCheckpointError(f"{path} is missing: {MANIFEST} does not list it.")
    try:
        raw = storage.read(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from error
    check_digest(path, FileDigest(len(raw), hashlib.sha256(raw).hexdigest()), manifest.files[name])
    return raw


def check_digest(path: str, found: FileDigest, listed: FileDigest) -> None:
    """Raise where a file is not what the manifest lists."""
    if found != listed:
        raise DamagedCheckpointError(
            f"{path} is damaged: its {found.size} bytes have the SHA-256 {found.sha256[:12]}…, but {MANIFEST} says "
            f"{listed.size} bytes with {str(listed.sha256)[:12]}…."
        )


def decoded(raw: bytes, path: str) -> Any:
    """Parse a JSON file of a checkpoint."""
    try:
        return json.loads(raw, parse_constant=_refused_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is not JSON: {error}.") from error


def _refused_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def encoded(content: Any) -> bytes:
    """Spell JSON as checkpoints do; a number that JSON has no word for cannot be in it."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _spelled(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_spelled(content)).hexdigest()
