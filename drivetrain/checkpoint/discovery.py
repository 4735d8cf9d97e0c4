"""Finding checkpoints: which there are, which is the newest good one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from drivetrain.checkpoint.load import Checkpoint
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.peers import Failure, Peers
from drivetrain.checkpoint.storage import MANIFEST, LocalStorage, Storage, storage_of
from drivetrain.checkpoint.writer_record import clean_stale
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState

logger = get_logger(__name__)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint in a directory of checkpoints.

    Attributes:
        path: its directory or URL.
        step: the optimizer step at which it was written, if known.
        saved_at: when, in seconds since the epoch.
        world_size: how many processes wrote it.
    """

    path: str
    step: int | None
    saved_at: float
    world_size: int


def list_checkpoints(
    root: str | os.PathLike[str], *, storage: Storage | None = None, warn: bool = True
) -> list[FoundCheckpoint]:
    """The complete checkpoints in a directory, the newest first: by step, then by time.

    Files are compared by name and size; their content is not read.

    Args:
        root: the directory or URL that the checkpoints are in.
        storage: where it is; found from `root` if None.
        warn: whether to warn of directories that look like checkpoints and are not whole.
    """
    found, base = storage_of(root)
    storage = storage or found
    if isinstance(storage, LocalStorage):
        clean_stale(base)
    checkpoints = []
    for name in storage.children(base):
        if name.startswith("."):
            continue
        path = storage.join(base, name)
        names = storage.sizes(path)
        if MANIFEST not in names and not any("tensors/" in file for file in names):
            continue  # some other directory
        try:
            manifest = Checkpoint(path, "size", storage).manifest
        except CheckpointError as error:
            if warn:
                logger.warning(f"Passing over {path}: {error}")
            continue
        checkpoints.append(_found(path, manifest))
    return sorted(checkpoints, key=_age)


def newest_checkpoint(
    root: str | os.PathLike[str],
    verify: bool = True,
    *,
    state: PartialState | None = None,
    storage: Storage | None = None,
) -> str | None:
    """The newest complete checkpoint in a directory; a damaged one is passed over with a warning.

    Args:
        root: the directory or URL that the checkpoints are in.
        verify: whether every file's SHA-256 is checked, not only its size. The checkpoint may then be loaded with
            `verify="size"`.
        state: this process among its peers, all of which must call it: the main process looks, and tells the others.
            None for a process that looks alone.
        storage: where it is; found from `root` if None.

    Returns:
        The checkpoint's path, or None where there is no good one.
    """
    peers = Peers(state)
    answer: str | Failure | None = None
    if peers.is_main:
        answer = peers.attempt(lambda: _newest(root, verify, storage))
    answer = peers.scatter([answer] * peers.size if peers.is_main else None)
    if isinstance(answer, Failure):
        peers.fail(answer, f"The checkpoints in {os.fspath(root)} could not be looked through")
    return answer


def _newest(root: str | os.PathLike[str], verify: bool, storage: Storage | None) -> str | None:
    for one in list_checkpoints(root, storage=storage):
        if not verify:
            return one.path
        try:
            Checkpoint(one.path, storage=storage).verify()
        except CheckpointError as error:
            logger.warning(f"Passing over {one.path}: {error}")
            continue
        return one.path
    return None


def _found(path: str, manifest: Manifest) -> FoundCheckpoint:
    return FoundCheckpoint(path, manifest.step, manifest.saved_at, manifest.world_size)


def _age(one: FoundCheckpoint) -> tuple[float, float]:
    return (-one.step if one.step is not None else 1.0, -one.saved_at)
