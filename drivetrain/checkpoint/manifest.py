"""`MANIFEST.json`: what a complete checkpoint consists of."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from drivetrain.checkpoint.safetensors_file import FileDigest
from drivetrain.checkpoint.storage import DATA_FOLDER, MANIFEST, NO_FILE, LocalStorage, Storage
from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError
from drivetrain.runtime.host import boot_id, is_alive, started_at, started_since_boot
from drivetrain.runtime.logging import get_logger

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
        return _spelled({**content, "checksum": hashlib.sha256(_spelled(content)).hexdigest()})

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Read the file's content."""
        try:
            content = json.loads(raw)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise DamagedCheckpointError(f"{where} is not the manifest of a drivetrain checkpoint.")
            version = content["version"]
            content.pop("checksum", None)
            if raw != _spelled({**content, "checksum": hashlib.sha256(_spelled(content)).hexdigest()}):
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
    """Read a checkpoint's manifest and compare the names and sizes of its files with what is there."""
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
    """Whether a directory has a manifest of ours, whole or not."""
    path = storage.join(directory, MANIFEST)
    try:
        content = decoded(storage.read(path), path)
    except (OSError, CheckpointError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def check_is_checkpoint(storage: Storage, directory: str, what: str) -> None:
    """Refuse a directory without a manifest of ours, whole or not: it holds something else."""
    if not has_manifest(storage, directory):
        raise CheckpointError(f"{directory} {what}: it is no checkpoint, as it has no {MANIFEST} of drivetrain's.")


def check_replaceable(storage: Storage, directory: str) -> None:
    """Refuse to let a checkpoint take the place of something that is none; nothing and an empty directory are."""
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


# Who writes a checkpoint, so that what dead runs left behind is distinguished from what a live one is writing


logger = get_logger(__name__)

OTHER_HOST_PATIENCE = 24 * 3600.0
"""Seconds after which a write on another machine, whose processes cannot be seen from here, counts as dead."""

UNRECORDED_PATIENCE = 600.0
"""Seconds after which a write that does not say whose it is counts as dead: saying so is the first thing it does."""

_TOKEN_LENGTH = 36

_LEFT_FILE = re.compile(r"^\.(?P<name>.+)\.(?P<token>[0-9a-f]{12,})\.(?P<what>writing|replaced|link)$")

_LEFT = re.compile(r"^\.(?P<name>.+)\.(?P<token>[0-9a-f]+)\.(?P<what>writing|replaced|removed)$")


@functools.cache
def writer_of(pid: int) -> dict[str, Any]:
    """Describe this process as no other will ever be: by its machine, its number and its start, not by the clock."""
    since_boot = started_since_boot()
    return {"host": _host(), "pid": pid, "started": started_at() if since_boot is None else since_boot}


def writer_token() -> str:
    """Return a new token for the name of a file that is being written, which names its writer."""
    started = round((started_since_boot() or 0.0) * 100)
    return f"{_host_hash()}{os.getpid():08x}{started:012x}{uuid.uuid4().hex[:8]}"


def clean_stale_files(root: str, patience: float = 3600.0) -> list[str]:
    """Remove what dead runs left of files half written, and give those back that were about to be replaced."""
    try:
        with os.scandir(root) as entries:
            plain = sorted(each.name for each in entries if not each.is_dir(follow_symlinks=False))
    except OSError:
        return []
    found = []
    for match in filter(None, map(_LEFT_FILE.match, plain)):
        path, final = os.path.join(root, match.string), os.path.join(root, match["name"])
        lives = _is_token_alive(match["token"])
        if lives or (lives is None and _is_recent(LocalStorage(), path, patience)):
            continue
        try:
            if match["what"] == "replaced" and not os.path.lexists(final):
                os.rename(path, final)
                logger.warning(f"{final}: a run ended while it replaced this file. The one before it is back.")
            else:
                os.unlink(path)
        except OSError:
            continue  # another process was faster, or nothing may be written here
        found.append(path)
    return found


def _is_token_alive(token: str) -> bool | None:
    """Whether the process that has made a token runs; None if it is another machine's, or not known."""
    if len(token) != _TOKEN_LENGTH or token[:8] != _host_hash():
        return None
    started = int(token[16:28], 16) / 100
    return is_alive(int(token[8:16], 16), started) if started else None


def _host_hash() -> str:
    return hashlib.sha256(_host().encode()).hexdigest()[:8]


def clean_stale(root: str) -> list[str]:
    """Remove what dead runs left of checkpoints half written, and give those back that were about to be replaced.

    Args:
        root: The directory that the checkpoints are in, on a local or shared file system.

    Returns:
        What was removed or given back, by path.
    """
    storage = LocalStorage()
    found = []
    for path, match in _left_in(storage, root):
        final = os.path.join(root, match["name"])
        writing = os.path.join(root, f".{match['name']}.{match['token']}.writing")
        if match["what"] == "replaced":
            # A live run is in the middle of replacing only while the new one is there, under one name or the other.
            # The order matters: a rename makes it leave the first and appear under the second at once.
            new = next((one for one in (writing, final) if os.path.isdir(one)), None)
            if new is not None and _is_alive(storage, new):
                continue
        elif match["what"] == "writing" and _is_alive(storage, path):
            continue
        if match["what"] == "replaced" and not os.path.lexists(final):
            try:
                os.rename(path, final)
            except OSError:
                continue  # another process was faster, or nothing may be written here
            logger.warning(f"{final}: a run ended while it replaced this checkpoint. The one before it is back.")
        else:
            storage.discard(path)
        found.append(path)
    return found + clean_stale_files(root)


def replaced_beside(directory: str) -> str | None:
    """The checkpoint that had this name before a run died in replacing it, where there is none of the name now."""
    parent, name = os.path.split(directory)
    if os.path.lexists(directory):
        return None
    for path, match in _left_in(LocalStorage(), parent):
        if match["name"] == name and match["what"] == "replaced" and os.path.isfile(os.path.join(path, MANIFEST)):
            return path
    return None


def _left_in(storage: LocalStorage, root: str) -> list[tuple[str, re.Match[str]]]:
    """What writes may have left in a directory, and its names taken apart; the checkpoint written last comes first."""
    matches = [match for match in map(_LEFT.match, storage.children(root)) if match is not None]
    left = [(os.path.join(root, match.string), match) for match in matches]
    return sorted(left, key=lambda one: -storage.modified(os.path.join(one[0], MANIFEST)))


def _is_alive(storage: LocalStorage, place: str) -> bool:
    """Whether the process that wrote to a place still runs, as far as can be known."""
    path = os.path.join(place, WRITER_FILE)
    try:
        writer = decoded(storage.read(path), path)
        host, pid, started = writer["host"], int(writer["pid"]), float(writer["started"])
    except (OSError, CheckpointError, KeyError, TypeError, ValueError):
        return _is_recent(storage, place, UNRECORDED_PATIENCE)
    if host != _host():
        return _is_recent(storage, path, OTHER_HOST_PATIENCE)
    return is_alive(pid, started)


def _is_recent(storage: LocalStorage, path: str, patience: float) -> bool:
    return time.time() - storage.modified(path) < patience


def _host() -> str:
    """This machine since it was started, and this container: elsewhere process numbers mean other processes."""
    parts = [socket.gethostname(), boot_id()]
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux
    return " ".join(filter(None, parts))


# How the state of a run is laid out in a checkpoint, and how earlier versions laid it out


LOSS_IS_FINITE = "loss_is_finite"
"""The entry of the shared state, or of its driver's, that is False where a loss before the save was not finite."""

# an earlier Trainer's name for a part of the engine -> its name now
_OF_A_TRAINER = {
    "optimizer_states": "optimizers",
    "lr_schedulers": "schedulers",
    "precision": "precision",
    "registered": "registered",
}
_OF_AN_ACCELERATOR = ("models", "optimizers", "schedulers", "loaders", "registered", "precision")


class Places(NamedTuple):
    """Where the large lists of a checkpoint are, as `only` and `into` of a reading name them.

    Attributes:
        models: The path of the models' states.
        optimizers: The path of the optimizers' states.
        one_model: Whether the first path leads to the state of an only model, rather than to a list.
    """

    models: str = "engine/models"
    optimizers: str = "engine/optimizers"
    one_model: bool = False

    def into(self, kind: str, states: list[Any]) -> dict[str, Any]:
        """The targets of a reading, laid out as the checkpoint is."""
        head, _, rest = getattr(self, kind).partition("/")
        value: Any = states
        if kind == "models" and self.one_model:
            if len(states) != 1:
                raise CheckpointError(f"The checkpoint holds 1 models, but here are {len(states)}.")
            value = states[0]
        return {head: {rest: value} if rest else value}


def find_places(names: Collection[str]) -> Places:
    """Where a checkpoint has its models and optimizers."""
    if "engine" in names:
        return Places()
    if "state_dict" in names:
        return Places("state_dict", "optimizer_states", one_model=True)
    return Places("models", "optimizers")


EVERY_PLACE_OF_MODELS = ("engine/models", "state_dict", "models")
"""For a reading of the models alone, whatever version wrote them."""


def in_schema(shared: Mapping[str, Any]) -> dict[str, Any]:
    """The shared state of a run as this version lays it out, from that of any version. Its values stay what they are.

    Args:
        shared: All entries of a checkpoint, or some; packed or not.

    Raises:
        CheckpointError: An entry is of another kind than the schema's.
    """
    if "engine" in shared:
        found = {"driver": {}, "kept": [], **shared}
        for name, kind in (("engine", Mapping), ("driver", Mapping), ("kept", list)):
            if not isinstance(found[name], kind):
                raise CheckpointError(
                    f"The checkpoint is not the state of a run: its entry {name!r} is a {type(found[name]).__name__}."
                )
        return found
    driver = dict(shared)
    engine: dict[str, Any] = {}
    if "state_dict" in shared:
        engine["models"] = [driver.pop("state_dict")]
        for before, now in _OF_A_TRAINER.items():
            if before in driver:
                engine[now] = driver.pop(before)
        if "loader" in driver:
            position = driver.pop("loader")
            combined = isinstance(position, Mapping) and "loaders" in position
            engine["loaders"] = position["loaders"] if combined else [] if position is None else [position]
            if combined:
                driver["combined_loader"] = {"index": position["index"], "ended": position["ended"]}
    else:
        for name in _OF_AN_ACCELERATOR:
            if name in driver:
                engine[name] = driver.pop(name)
    return {"engine": engine, "driver": driver, "kept": []}


def process_in_schema(own: Mapping[str, Any]) -> dict[str, Any]:
    """One process's own state as this version lays it out, from that of any version."""
    if "engine" in own:
        return dict(own)
    return {
        "engine": {"random": own.get("random")},
        "driver": {name: value for name, value in own.items() if name != "random"},
    }
