"""The directory that checkpoints are kept in: names, links, copies and removal. For the main process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress

from drivetrain import checkpoint
from drivetrain.callbacks.checkpoint.restored import RestoredState
from drivetrain.checkpoint.locations import storage_of
from drivetrain.checkpoint.manifest import check_replaceable
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.writer_record import writer_token
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.terminal import without_credentials
from drivetrain.trackers import Tracker
from drivetrain.trackers.directory import DirectoryTracker

logger = get_logger(__name__)

KINDS = ("writing", "replaced")
"""How the names of directories that stand in for a checkpoint end; what a killed run leaves of them is cleaned up."""


def resolved(path: str | os.PathLike[str]) -> str:
    """A directory as an absolute path, or as the URL that it is."""
    return storage_of(path)[1]


def is_local(path: str) -> bool:
    """Whether a path is on a file system of this machine, which has links."""
    return isinstance(storage_of(path)[0], LocalStorage)


def is_taken(path: str) -> bool:
    """Whether there is anything of this name."""
    storage, place = storage_of(path)
    return os.path.lexists(place) if isinstance(storage, LocalStorage) else storage.is_directory(place)


def free_path(
    path: str, extension: str, may_replace: Callable[[str], bool] = lambda candidate: False, first: int = 1
) -> str:
    """The path for a name: a free one, with a number where the name is taken, or one that may be replaced.

    Args:
        path: The path without its extension.
        extension: What it ends in.
        may_replace: Whether what has a path may be replaced.
        first: The first number.
    """
    candidate, version = path + extension, first - 1
    while is_taken(candidate) and not may_replace(candidate):
        version += 1
        candidate = f"{path}-v{version}{extension}"
    return candidate


def relative(path: str | None, root: str) -> str | None:
    """A directory as seen from a root, or None where it is not below it."""
    if path is None or not root or not path.startswith(root.rstrip("/") + "/"):
        return None
    return os.path.relpath(path, root)


def continued(path: str | None, state: RestoredState, root: str, own: Sequence[str]) -> str | None:
    """Where a resumed run saves that was given no directory: where the run before it did, if that is one of its own.

    Args:
        path: Where it would save if it were new.
        state: Of the run before it.
        root: The default directory of this run.
        own: The directories that runs of this script save in by default.
    """
    moved = [os.path.join(root, state.below_root)] if state.below_root and _leads_below(root, state.below_root) else []
    candidates = [*moved, *(each for each in own if is_same(each, state))]
    return next((candidate for candidate in candidates if is_taken(candidate)), path)


def is_same(path: str | None, state: RestoredState) -> bool:
    """Whether a directory is the one of an earlier run, there or moved. The earlier one is only compared.

    Args:
        path: The directory.
        state: Of the earlier run.
    """
    old, newest = state.saved_in, state.names["newest"]
    if path is None or without_credentials(path) == without_credentials(old or ""):
        return True
    if not old or "://" in old or not is_local(path):
        return False  # nothing is asked of a storage that only a checkpoint names
    if os.path.realpath(path) == os.path.realpath(old):
        return True
    return bool(newest) and not is_taken(f"{old}/{newest}") and is_taken(f"{path}/{newest}")


def _leads_below(root: str, name: str) -> bool:
    """Whether a name below a directory leads there once links are followed."""
    return os.path.realpath(os.path.join(root, name)).startswith(os.path.realpath(root) + os.sep)


def default_places(trackers: Sequence[Tracker], root: str) -> list[str]:
    """Where runs save that were given no directory: beside what trackers write, the newest run first."""
    if not is_local(root):
        return [f"{resolved(root)}/checkpoints"]
    found = [
        str(version / "checkpoints")
        for tracker in trackers
        if isinstance(tracker, DirectoryTracker)
        for version in tracker.run_directory.existing()
    ]
    return [*dict.fromkeys(os.path.abspath(path) for path in found), os.path.join(os.path.abspath(root), "checkpoints")]


def link(path: str, target: str) -> None:
    """Let `path` be a relative symbolic link to a checkpoint beside it, whatever it was before."""
    _check_replaceable(path)
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{writer_token()}.link")
    try:
        os.symlink(os.path.relpath(target, os.path.dirname(path)), beside)
        if os.path.isdir(path) and not os.path.islink(path):
            checkpoint.remove_checkpoint(path)
        os.replace(beside, path)
    except OSError as error:
        if os.path.islink(beside):
            os.unlink(beside)
        raise CheckpointError(f"{path} could not be made a link to {target}: {error}.") from error


def duplicate(path: str, source: str) -> None:
    """Let `path` be a second name of a checkpoint: its files are linked hard, or copied where that cannot be."""
    _check_replaceable(path)
    if os.path.isfile(source):
        _duplicate_file(path, source)
        return
    token = writer_token()
    place, replaced = (
        os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{token}.{what}") for what in KINDS
    )
    try:
        shutil.copytree(source, place, copy_function=_link_or_copy)
        for folder, _, _ in os.walk(place, topdown=False):
            _sync(folder)
        if os.path.lexists(path):
            os.rename(path, replaced)
        os.rename(place, path)
        _sync(os.path.dirname(path))
    except OSError as error:
        _put_back(path, replaced)
        shutil.rmtree(place, ignore_errors=True)
        raise CheckpointError(f"{path} could not be made a copy of {source}: {error}.") from error
    LocalStorage().discard(replaced)


def _duplicate_file(path: str, source: str) -> None:
    """Let the path name the file in one moment; where that may not last, it names again what it did before."""
    token = writer_token()
    place, replaced = (
        os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{token}.{what}") for what in KINDS
    )
    try:
        _link_or_copy(source, place)
        if os.path.isfile(path):
            _link_or_copy(path, replaced)
        os.replace(place, path)
        _sync(os.path.dirname(path))
    except OSError as error:
        if os.path.isfile(replaced) and not os.path.lexists(place):
            with suppress(OSError):  # what is there then is whole, too
                os.replace(replaced, path)
        for beside in (place, replaced):
            LocalStorage().discard(beside)
        raise CheckpointError(f"{path} could not be made a copy of {source}: {error}.") from error
    LocalStorage().discard(replaced)


def _check_replaceable(path: str) -> None:
    """Refuse to let a checkpoint take the place of something that is none."""
    if os.path.islink(path) or not os.path.isfile(path):
        check_replaceable(LocalStorage(), path)
    elif not checkpoint.is_checkpoint(path):
        raise CheckpointError(f"{path} is not replaced by a checkpoint: it is a file that no run has written.")


def _put_back(path: str, replaced: str) -> None:
    """Give a checkpoint its name again that was about to be replaced, if it can be done."""
    if not os.path.lexists(replaced):
        return
    try:
        LocalStorage().discard(path)
        os.rename(replaced, path)
    except OSError as error:
        # It is found under its other name, too.
        logger.warning(f"{path} could not be given back what it was before: {error}.")


def remove(path: str, files: checkpoint.CheckpointFiles) -> None:
    """Remove a checkpoint, or a link to one; what cannot be removed stays, with a warning.

    Args:
        path: The path.
        files: How the run keeps its checkpoints.
    """
    try:
        files.remove(path)
    except (OSError, CheckpointError) as error:
        logger.warning(f"A checkpoint that nobody needs any more stays: {error}")


def surplus(directory: str, limit: int, needed: set[str]) -> list[str]:
    """The checkpoints of a directory that are beyond a limit, those of the fewest steps.

    Args:
        directory: Where they are.
        limit: How many may stay.
        needed: Those that stay in any case; they count.
    """
    needed = {os.path.realpath(path) if os.path.islink(path) else path for path in needed}
    found = [one.path for one in checkpoint.list_checkpoints(directory, warn=False)]  # by step: clocks are set
    others = [path for path in found if path not in needed]
    return others[max(0, limit - (len(found) - len(others))) :]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)  # a file system without hard links, or one name too many
        _sync(target)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leading_outside(directory: str, state: RestoredState) -> set[str]:
    """The names of a restored state that links in the directory make lead outside of it."""
    return state.leading_outside(directory) if is_local(directory) else set()
