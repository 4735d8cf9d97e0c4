"""Files in Lightning's format that this package has written: how they appear, and how they are known again."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint.lightning_extras import Extras
from drivetrain.checkpoint.lightning_format import lightning_state
from drivetrain.checkpoint.locations import storage_of
from drivetrain.checkpoint.manifest import has_manifest
from drivetrain.checkpoint.pickled import plain_classes
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.tree import pack
from drivetrain.runtime.errors import CheckpointError, ConfigurationError

_ZIP = b"PK\x03\x04"
_PATIENCE = 3600.0
"""Seconds after which a file without a write counts as left by a dead run."""


def write_lightning_file(
    path: str | os.PathLike[str],
    shared: Mapping[str, Any],
    processes: Sequence[Mapping[str, Any]],
    *,
    datamodule: str | None = None,
    callbacks: Mapping[str, Any] | None = None,
    epoch_length: float = float("inf"),
) -> str:
    """Write the state of a Trainer's run as a `.ckpt` file that Lightning opens, on one process.

    The file appears complete or not at all.

    Args:
        path: The file, which is replaced where there is one.
        shared: The shared state, whole, in the schema of `drivetrain.checkpoint.schema`.
        processes: What each process keeps of its own, by rank, packed.
        datamodule: The name of the data module's class, under which Lightning looks for its state.
        callbacks: States of callbacks that differ in Lightning, by their keys.
        epoch_length: Batches of a process in an epoch, where it is known.

    Returns:
        `path`.

    Raises:
        CheckpointError: It is not the state of a Trainer, holds an object, or cannot be written.
        ConfigurationError: `path` is a URL or a directory.
    """
    target = check_lightning_file(path)
    if "progress" not in shared["driver"] or len(shared["engine"].get("models", ())) != 1:
        raise CheckpointError(
            f"{target} would not be the state of a Trainer with one model, so Lightning could not open it."
        )
    pack(dict(shared))  # refuses objects, by their place
    content = lightning_state(shared, processes, datamodule, callbacks, epoch_length)
    folder, name = os.path.split(target)
    place = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.writing")
    try:
        os.makedirs(folder, exist_ok=True)
        _clean(Path(folder), name)
        with open(place, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(place, target)
    except (OSError, RuntimeError) as error:
        if os.path.lexists(place):
            os.unlink(place)
        raise CheckpointError(f"{target} could not be written: {error}.") from error
    return os.fspath(path)


def check_lightning_file(path: str | os.PathLike[str]) -> str:
    """The local path of a file of Lightning's that is to be written.

    Raises:
        ConfigurationError: It is a URL, or a directory is there.
    """
    storage, target = storage_of(path)
    if not isinstance(storage, LocalStorage):
        raise ConfigurationError(f"{os.fspath(path)} is a URL. Write a file of Lightning's locally, and copy it there.")
    if os.path.isdir(target) and not os.path.islink(target):
        what = "a checkpoint of drivetrain" if has_manifest(storage, target) else "a directory"
        raise ConfigurationError(f"{target} is {what}. Name another file for Lightning's format, or remove it.")
    return target


def extras_at(path: str) -> Extras | None:
    """What a local file holds beside Lightning's entries; None where there is no file that this package has written.

    The weights are not read.

    Args:
        path: The file. A link is none.
    """
    try:
        if os.path.islink(path) or not os.path.isfile(path) or not _begins_as_zip(path):
            return None
        with torch.serialization.safe_globals(plain_classes()):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return Extras.of(content, path)
    except Exception:  # whatever torch raises of a file that is something else
        return None


def _begins_as_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _clean(folder: Path, name: str) -> None:
    """Remove what dead runs left of this file half written."""
    for path in folder.glob(f".{_escaped(name)}.????????????.writing"):
        if path.is_file() and time.time() - path.stat().st_mtime > _PATIENCE:
            path.unlink(missing_ok=True)


def _escaped(name: str) -> str:
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)
