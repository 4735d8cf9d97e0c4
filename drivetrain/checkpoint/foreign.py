"""Checkpoints that other tools wrote, whichever tool it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO

from drivetrain.checkpoint.accelerate_format import is_accelerate_state, read_accelerate_state
from drivetrain.checkpoint.lightning_file import extras_at
from drivetrain.checkpoint.lightning_format import is_lightning_checkpoint, read_lightning_state
from drivetrain.checkpoint.load import Checkpoint
from drivetrain.checkpoint.manifest import in_schema
from drivetrain.checkpoint.run_state import load_run_state
from drivetrain.checkpoint.storage import LocalStorage, storage_of


def read_foreign(
    path: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
    rank: int = 0,
    count: int | None = None,
    objects: bool = False,
    given: Collection[str] | None = (),
) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Read a checkpoint of Hugging Face Accelerate's or of Lightning's, alone. Nothing in it is executed by default.

    Args:
        path: A local file or directory; or an opened file of Lightning's, or what one holds.
        rank: Whose random state to read, where there is one.
        count: How many processes read it; as many as wrote it if None.
        objects: Whether objects in a file of Lightning's are unpickled, which runs whatever code it holds.
        given: The hyper-parameters that are not needed; None if none is. Objects among these are left out rather than
            refused.

    Returns:
        The shared state and a process's own, in the schema of `drivetrain.checkpoint.manifest`; None where the
        checkpoint is neither, as the directories of this package. The second is None too where this package
        wrote the file from another number of processes.

    Raises:
        CheckpointError: It cannot be read, or holds what would have to be unpickled.
    """
    if not isinstance(path, str | os.PathLike) or is_lightning_checkpoint(path):
        return read_lightning_state(path, rank, count, objects, given)
    if is_accelerate_state(path):
        return read_accelerate_state(path, rank)
    return None


def read_processes(path: str | os.PathLike[str]) -> tuple[int, Callable[[int], Any]]:
    """How many processes wrote a checkpoint of this package, and a function that reads what each kept of its own.

    Args:
        path: The directory, the file in Lightning's format, or the URL.

    Raises:
        CheckpointError: There is no complete checkpoint of this package.
    """
    storage, place = storage_of(path)
    extras = extras_at(os.path.realpath(place)) if isinstance(storage, LocalStorage) else None
    if extras is not None:
        return extras.world_size, extras.own
    written = Checkpoint(path, verify="size")
    return written.manifest.world_size, written.own


def read_shared(
    path: str | os.PathLike[str] | BinaryIO,
    only: Collection[str] | None = None,
    objects: bool = False,
    given: Collection[str] | None = (),
) -> dict[str, Any]:
    """Read the shared state of a checkpoint, whichever tool wrote it, alone.

    Args:
        path: The checkpoint.
        only: The entries that are wanted; others may be there, too.
        objects: Whether objects in a file of Lightning's are unpickled, which runs whatever code it holds.
        given: The hyper-parameters that are not needed; see `read_foreign`.

    Returns:
        The state in the schema of `drivetrain.checkpoint.manifest`.

    Raises:
        CheckpointError: There is no complete checkpoint, or it cannot be read.
    """
    foreign = read_foreign(path, objects=objects, given=given)
    if foreign is not None:
        return foreign[0]
    assert not hasattr(path, "read")
    return in_schema(load_run_state(path, only=only)[0])
