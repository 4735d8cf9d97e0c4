"""Search for checkpoints in a directory: all complete ones, or the newest intact one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from drivetrain.checkpoint.formats import written_file
from drivetrain.checkpoint.load import Checkpoint
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.save import Failure, Peers
from drivetrain.checkpoint.storage import LocalStorage, Storage, clean_stale, storage_of
from drivetrain.checkpoint.torch_files import check_parts
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState

logger = get_logger(__name__)


@dataclass(frozen=True)
class FoundCheckpoint:
    """Description of a complete checkpoint: where it is, when it was saved, and by how many processes.

    Attributes:
        path: Its directory or URL, or its file in another tool's format.
        step: The optimizer step at which it was written, if known.
        saved_at: The time of the save, in seconds since 1970.
        world_size: The number of processes that wrote it.
        finite_loss: True if every loss since the previous save was finite.
        is_file: True if it is a file in another tool's format.
    """

    path: str
    step: int | None
    saved_at: float
    world_size: int
    finite_loss: bool = True
    is_file: bool = False


def list_checkpoints(
    root: str | os.PathLike[str], *, storage: Storage | None = None, warn: bool = True
) -> list[FoundCheckpoint]:
    """Return the complete checkpoints in a directory, the newest first.

    They are ordered by step, and then by time.

    Files are checked by name and size. Their content is not read. Files in another tool's format are included if
    drivetrain wrote them.

    Args:
        root: The directory or URL that contains the checkpoints.
        storage: The storage to search. None selects it from `root`.
        warn: True to warn about incomplete checkpoints.

    Returns:
        The checkpoints.
    """
    found, base = storage_of(root)
    storage = storage or found
    if isinstance(storage, LocalStorage):
        clean_stale(base)
    checkpoints = []
    if isinstance(storage, LocalStorage):
        checkpoints = [one for one in map(_file_at, storage.files(base)) if one is not None]
    for name in storage.children(base):
        # Hidden directories belong to saves that are running or were interrupted.
        if name.startswith("."):
            continue
        path = storage.join(base, name)
        if not storage.resembles_checkpoint(path):
            continue
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
    """Return the path of the newest intact checkpoint in a directory.

    Damaged ones are skipped with a warning. A checkpoint that was saved after a NaN or infinite loss is also skipped if
    an older one without such a loss exists, because its weights may contain NaN. Otherwise it is returned with a
    warning.

    Args:
        root: The directory or URL that contains the checkpoints.
        verify: True to check the SHA-256 of every file, not only its size. The checkpoint can then be loaded with
            `verify="size"`.
        state: The process state of the run. All processes must then call the function: the main process searches, and
            all return its result. None if a single process searches.
        storage: The storage to search. None selects it from `root`.

    Returns:
        The checkpoint's path, or None if there is no intact one.
    """
    peers = Peers(state)
    answer: str | Failure | None = None
    if peers.is_main:
        answer = peers.attempt(lambda: _newest(root, verify, storage))
    answer = peers.scatter([answer] * peers.size if peers.is_main else None)
    if isinstance(answer, Failure):
        peers.fail(answer, f"The checkpoints in {os.fspath(root)} could not be searched")
    return answer


def _newest(root: str | os.PathLike[str], verify: bool, storage: Storage | None) -> str | None:
    found = list_checkpoints(root, storage=storage)
    # Checkpoints that were saved after a NaN or infinite loss are the last resort.
    for one in [each for each in found if each.finite_loss] + [each for each in found if not each.finite_loss]:
        if verify and not _is_whole(one, storage):
            continue
        if not one.finite_loss:
            logger.warning(f"{one.path} was saved after a non-finite loss, but no other complete checkpoint exists.")
        elif not found[0].finite_loss and _age(found[0]) < _age(one):
            logger.warning(
                f"{found[0].path} is skipped, because it was saved after a non-finite loss. The run resumes from "
                f"{one.path}. To use the skipped checkpoint, pass its path."
            )
        return one.path
    return None


def checkpoint_at(path: str | os.PathLike[str], *, storage: Storage | None = None) -> FoundCheckpoint:
    """Return the step, time and number of processes of the checkpoint at `path`, without loading its tensors.

    Call it on one process only.

    Args:
        path: The checkpoint.
        storage: The storage to read from. None selects it from `path`.

    Returns:
        Its step, time and other facts from its manifest.

    Raises:
        CheckpointError: There is no complete drivetrain checkpoint.
    """
    found, place = storage_of(path)
    # Follow a link to a file, such as `last.ckpt`.
    one = _file_at(os.path.realpath(place)) if isinstance(storage or found, LocalStorage) else None
    return one or _found(place, Checkpoint(place, "size", storage or found).manifest)


def _is_whole(one: FoundCheckpoint, storage: Storage | None) -> bool:
    try:
        if one.is_file:
            check_parts(one.path)
        else:
            Checkpoint(one.path, storage=storage).verify()
    except CheckpointError as error:
        logger.warning(f"The checkpoint {one.path} is skipped: {error}")
        return False
    return True


def whole_beside(directory: str | os.PathLike[str], storage: Storage | None = None) -> str:
    # A sentence for the error message about a damaged checkpoint.
    found, path = storage_of(directory)
    storage = storage or found
    try:
        others = [
            one
            for one in list_checkpoints(storage.parent(path), storage=storage, warn=False)
            if storage.name(one.path) != storage.name(path)
        ]
        for one in others:
            if _is_whole(one, storage):
                step = "" if one.step is None else f" (step {one.step})"
                return f" The newest whole checkpoint beside it is {one.path}{step}."
    except (OSError, CheckpointError):
        return ""  # must not hide the original error
    return " No other checkpoint beside it is whole." if others else ""


def _found(path: str, manifest: Manifest) -> FoundCheckpoint:
    return FoundCheckpoint(path, manifest.step, manifest.saved_at, manifest.world_size, manifest.finite_loss)


def _file_at(path: str) -> FoundCheckpoint | None:
    file = written_file(path)
    if file is None:
        return None
    return FoundCheckpoint(path, file.step, file.saved_at, file.world_size, file.finite_loss, is_file=True)


def _age(one: FoundCheckpoint) -> tuple[float, float]:
    # Sorts the newest first. Checkpoints without a step come last.
    return (-one.step if one.step is not None else 1.0, -one.saved_at)
