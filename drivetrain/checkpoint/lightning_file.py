"""Writing a checkpoint of this package as a file of Lightning's."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.checkpoint.entry_points import load_run_state
from drivetrain.checkpoint.lightning_format import lightning_state
from drivetrain.checkpoint.locations import storage_of
from drivetrain.checkpoint.manifest import has_manifest
from drivetrain.checkpoint.schema import in_schema
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.runtime.errors import CheckpointError, ConfigurationError


def write_lightning_file(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    datamodule: str | None = None,
    callbacks: Mapping[str, Any] | None = None,
    epoch_length: float = float("inf"),
) -> str:
    """Write a Trainer's checkpoint as a `.ckpt` file that Lightning opens, on one process.

    The whole state is in memory meanwhile, whatever strategy saved it. The file appears complete or not at all.

    Args:
        directory: A checkpoint that a Trainer has written.
        path: The file, which is replaced where there is one.
        datamodule: The name of the data module's class, under which Lightning looks for its state.
        callbacks: States of callbacks that differ in Lightning, by their keys.
        epoch_length: Batches of a process in an epoch, where it is known.

    Returns:
        `path`.

    Raises:
        CheckpointError: There is no complete checkpoint, no Trainer wrote it, or the file cannot be written.
        ConfigurationError: `path` is a URL or a directory.
    """
    target = check_lightning_file(path)
    shared = in_schema(load_run_state(directory, verify="size")[0])
    if "progress" not in shared["driver"] or len(shared["engine"].get("models", ())) != 1:
        raise CheckpointError(
            f"{os.fspath(directory)} is not the state of a Trainer with one model, so Lightning could not open it."
        )
    if callbacks:
        shared["driver"]["callbacks"] = {**shared["driver"].get("callbacks", {}), **callbacks}
    place = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{uuid.uuid4().hex[:12]}.writing")
    try:
        with open(place, "wb") as file:
            torch.save(lightning_state(shared, datamodule, epoch_length), file)
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
    if os.path.isdir(target):
        what = "a checkpoint of drivetrain" if has_manifest(storage, target) else "a directory"
        raise ConfigurationError(f"{target} is {what}. Name another file for Lightning's format, or remove it.")
    return target
