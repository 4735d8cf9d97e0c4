"""`MANIFEST.json`: the list of a checkpoint's files with sizes and hashes, and the schema of its state."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from drivetrain.checkpoint.storage import DATA_FOLDER, MANIFEST, NO_FILE, FileDigest, Storage
from drivetrain.checkpoint.tree import decoded
from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError

FORMAT = "drivetrain.checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Content of `MANIFEST.json`, which lists all other files of a checkpoint.

    Attributes:
        files: Size and SHA-256 of every other file of the checkpoint, by name.
        world_size: The number of processes that wrote the checkpoint.
        step: The optimizer step at which it was written, if known.
        saved_at: The time of the save, in seconds since 1970.
        data: The folder of the files, relative to the manifest. Empty if they are next to it.
        finite_loss: True if every loss since the previous save was finite. If False, the weights may contain NaN.
        version: The version of the checkpoint format.
    """

    files: dict[str, FileDigest]
    world_size: int
    step: int | None = None
    saved_at: float = 0.0
    data: str = ""
    finite_loss: bool = True
    version: int = VERSION

    def to_bytes(self) -> bytes:
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
        try:
            content = json.loads(raw)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise DamagedCheckpointError(f"{where} is not the manifest of a drivetrain checkpoint.")
            version = content["version"]
            content.pop("checksum", None)
            # The whole text is compared, so that only one spelling of the content is accepted.
            if raw != _spelled({**content, "checksum": hashlib.sha256(_spelled(content)).hexdigest()}):
                raise DamagedCheckpointError(f"{where} is damaged: its content does not match its checksum.")
            if version not in _READERS:
                raise CheckpointError(
                    f"{where} has format version {version!r}, but this drivetrain reads versions up to {VERSION}. "
                    "Install the drivetrain version that wrote the checkpoint, or a later version."
                )
            return _READERS[version](content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = error if type(error) is ValueError else repr(error)
            raise DamagedCheckpointError(f"{where} is damaged: {reason}.") from error


def _read_version_1(content: dict[str, Any]) -> Manifest:
    files = {name: FileDigest(one["size"], one["sha256"]) for name, one in content["files"].items()}
    for name, digest in files.items():
        # A name must not lead to files outside of the checkpoint.
        if not _is_inside(name):
            raise ValueError(f"it lists {name!r}, which is not the name of a file in the checkpoint")
        if not (_is_count(digest.size) and isinstance(digest.sha256, str) and _SHA256.fullmatch(digest.sha256)):
            raise ValueError(f"it lists {name} without a valid size and SHA-256")
    world_size, step, saved_at, data = (content[key] for key in ("world_size", "step", "saved_at", "data"))
    if data != "" and not (isinstance(data, str) and _DATA.fullmatch(data)):
        raise ValueError(f"it has the invalid folder name {data!r}")
    fits = _is_count(world_size) and world_size > 0 and (step is None or _is_count(step))
    if not fits or not (_is_count(saved_at) or (type(saved_at) is float and math.isfinite(saved_at))):
        raise ValueError(
            f"at least one of world_size={world_size!r}, step={step!r} and saved_at={saved_at!r} is not valid"
        )
    return Manifest(files, world_size, step, saved_at, data, content.get("finite_loss", True) is True, version=1)


_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATA = re.compile(rf"{DATA_FOLDER}[0-9a-zA-Z]+")


def _is_count(value: Any) -> bool:
    # Not isinstance, which would accept True and False.
    return type(value) is int and 0 <= value < 2**63


def _is_inside(name: str) -> bool:
    """Return True if a relative path stays within its directory."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


# One reader for each version of the format that has been released.
_READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {1: _read_version_1}


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """Return a checkpoint's manifest, after checking that its files are complete."""
    path = storage.join(directory, MANIFEST)
    found = storage.sizes(directory)
    try:
        if found.get(MANIFEST) == NO_FILE:
            raise DamagedCheckpointError(f"{path} is a link or a device, but it must be a regular file.")
        raw = storage.read(path)
    except FileNotFoundError:
        what = "there is no such directory" if not storage.is_directory(directory) else f"{MANIFEST} is missing"
        raise DamagedCheckpointError(
            f"There is no complete checkpoint at {directory}: {what}. Pass the directory that save_state or "
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
                f"{storage.join(directory, name)} is a link or a device, but a checkpoint contains only regular files. "
                "Replace the link with the file that it points to, or remove the link."
            )
    for name, digest in listed.items():
        path = storage.join(directory, name)
        if name not in found:
            raise DamagedCheckpointError(f"{path} is missing, though {MANIFEST} lists it.")
        if found[name] != digest.size:
            raise DamagedCheckpointError(f"{path} has {found[name]} bytes, but {MANIFEST} says {digest.size}.")
    for name in sorted(found):
        # Other files are an error, except those of other saves on a remote file system.
        if name in listed or name == MANIFEST:
            continue
        if manifest.data and name.startswith(DATA_FOLDER) and not name.startswith(f"{manifest.data}/"):
            continue  # of a save that was interrupted or is still running
        raise DamagedCheckpointError(
            f"{storage.join(directory, name)} does not belong to the checkpoint: {MANIFEST} does not list it. "
            "Remove it if you put it there."
        )


def has_manifest(storage: Storage, directory: str) -> bool:
    """Return True if a directory contains a manifest, even a damaged one."""
    path = storage.join(directory, MANIFEST)
    try:
        content = decoded(storage.read(path), path)
    except (OSError, CheckpointError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def check_is_checkpoint(storage: Storage, directory: str, what: str) -> None:
    if not has_manifest(storage, directory):
        raise CheckpointError(f"{directory} {what}: it is not a checkpoint, because it has no drivetrain {MANIFEST}.")


def check_replaceable(storage: Storage, directory: str) -> None:
    """Raise an error if a save would overwrite something other than a checkpoint."""
    if not storage.exists(directory) or storage.is_link(directory):
        return
    try:
        check_is_checkpoint(storage, directory, "is not replaced by a checkpoint")
    except CheckpointError:
        # An interrupted save to a remote file system leaves data folders only, which may be replaced.
        is_free = all(name.startswith(DATA_FOLDER) for name in storage.sizes(directory))
        if not (is_free and storage.is_directory(directory)):
            raise


def verified_bytes(storage: Storage, directory: str, manifest: Manifest, name: str) -> bytes:
    """Return the content of a small file of a checkpoint, after checking its SHA-256."""
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
    if found != listed:
        raise DamagedCheckpointError(
            f"{path} is damaged: its {found.size} bytes have the SHA-256 {found.sha256[:12]}…, but {MANIFEST} says "
            f"{listed.size} bytes with {str(listed.sha256)[:12]}…."
        )


def _spelled(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


# Structure of a run's state in a checkpoint, in this and in earlier versions


LOSS_IS_FINITE = "loss_is_finite"
"""Entry of the shared state, or of its `driver`, that is False if a loss before the save was NaN or infinite."""

# entry written by an earlier Trainer -> current name of the entry in `engine`
_OF_A_TRAINER = {
    "optimizer_states": "optimizers",
    "lr_schedulers": "schedulers",
    "precision": "precision",
    "registered": "registered",
}
_OF_AN_ACCELERATOR = ("models", "optimizers", "schedulers", "loaders", "registered", "precision")


class Places(NamedTuple):
    """Paths in a checkpoint's nested dict, such as `engine/models`, of the models' and the optimizers' states.

    Attributes:
        models: The path of the models' states.
        optimizers: The path of the optimizers' states.
        one_model: True if `models` is the path of a single model's state instead of a list.
    """

    models: str = "engine/models"
    optimizers: str = "engine/optimizers"
    one_model: bool = False

    def into(self, kind: str, states: list[Any]) -> dict[str, Any]:
        head, _, rest = getattr(self, kind).partition("/")
        value: Any = states
        if kind == "models" and self.one_model:
            if len(states) != 1:
                raise CheckpointError(f"The checkpoint contains 1 model, but the run has {len(states)} models.")
            value = states[0]
        return {head: {rest: value} if rest else value}


def find_places(names: Collection[str]) -> Places:
    if "engine" in names:
        return Places()
    if "state_dict" in names:
        return Places("state_dict", "optimizer_states", one_model=True)
    return Places("models", "optimizers")


EVERY_PLACE_OF_MODELS = ("engine/models", "state_dict", "models")
"""Paths at which any version of drivetrain stores models, for reading only the models."""


def in_schema(shared: Mapping[str, Any]) -> dict[str, Any]:
    if "engine" in shared:
        found = {"driver": {}, "kept": [], **shared}
        for name, kind in (("engine", Mapping), ("driver", Mapping), ("kept", list)):
            if not isinstance(found[name], kind):
                raise CheckpointError(
                    f"The checkpoint is not the state of a run: its entry {name!r} is a {type(found[name]).__name__}."
                )
        return found
    # An older version wrote the state under other keys.
    driver = dict(shared)
    engine: dict[str, Any] = {}
    if "state_dict" in shared:
        engine["models"] = [driver.pop("state_dict")]
        for before, now in _OF_A_TRAINER.items():
            if before in driver:
                engine[now] = driver.pop(before)
        if "loader" in driver:
            position = driver.pop("loader")
            # The position of a CombinedLoader contains those of its loaders.
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
    if "engine" in own:
        return dict(own)
    # An older version wrote the state under other keys.
    return {
        "engine": {"random": own.get("random")},
        "driver": {name: value for name, value in own.items() if name != "random"},
    }
