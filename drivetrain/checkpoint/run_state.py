"""The plain entry points: save the state of a run, load it, and remove what was saved."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch

from drivetrain.checkpoint.discovery import whole_beside
from drivetrain.checkpoint.lightning_file import extras_at
from drivetrain.checkpoint.load import Checkpoint, Verify
from drivetrain.checkpoint.manifest import check_is_checkpoint, has_manifest
from drivetrain.checkpoint.safetensors_file import INDEX
from drivetrain.checkpoint.save import SHARED_FILE, Failure, Peers, PendingSave, save_queue
from drivetrain.checkpoint.storage import LocalStorage, Storage, storage_of
from drivetrain.checkpoint.tree import unpack
from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError
from drivetrain.runtime.state import PartialState


def save_run_state(
    directory: str | os.PathLike[str],
    shared: Any,
    own: Any,
    state: PartialState,
    *,
    step: int | None = None,
    block: bool = True,
    storage: Storage | None = None,
    extra: str | None = None,
    optimizers: object = None,
) -> PendingSave:
    """Write a checkpoint; call it on all processes. Waits for one that is still being written.

    Args:
        directory: The checkpoint's directory or URL; what has that name is replaced once the new one is complete.
        shared: What is the same on all processes: nested dicts and lists of plain values and tensors. A tensor that
            all have is written once, a sharded DTensor by each process that has a part of it.
        own: What is this process's own, of the same kinds.
        state: This process among its peers.
        step: The optimizer step, by which `newest_checkpoint` finds the newest; `shared["global_step"]` if None.
        block: Whether to return only once the checkpoint is there. Else its tensors are copied, may change at once,
            and are written in the background.
        storage: Where to; found from `directory` if None.
        extra: A local directory whose content becomes part of the checkpoint; from `extra_place`.
        optimizers: Deprecated, without effect: all of the state is copied before the call returns.

    Returns:
        The save: done where `block` is true, else to be waited for.

    Raises:
        CheckpointError: Any process cannot save or write it, or the save before failed in the background; raised on
            all, and what was there before is intact.
    """
    if step is None and isinstance(shared, dict) and isinstance(shared.get("global_step"), int):
        step = shared["global_step"]
    return save_queue(state).save(
        directory, shared, own, step=step, block=block, storage=storage, extra=extra, optimizers=optimizers
    )


def load_run_state(
    directory: str | os.PathLike[str],
    state: PartialState | None = None,
    *,
    into: Mapping[str, Any] | None = None,
    strict: bool = True,
    only: Collection[str] | None = None,
    verify: Verify = "hash",
    storage: Storage | None = None,
) -> tuple[Any, Any | None]:
    """Read a checkpoint. Nothing in it is ever unpickled.

    Args:
        directory: The checkpoint's directory or URL.
        state: This process among its peers, all of which must call it; an error of one is raised on all. None for a
            process that reads alone.
        into: Some of the shared state's top-level entries, with tensors that are filled in place; they may be sharded.
        strict: Whether tensors missing, left over or of another shape under those entries are an error.
        only: The shared state's top-level entries to read, or paths of two names such as `"engine/models"`; all if
            None. Files that hold none of them are not read.
        verify: `"hash"` checks the SHA-256 of every file, `"size"` their sizes only, as after `newest_checkpoint`.
        storage: Where it is; found from `directory` if None.

    Returns:
        What all processes share, and this process's own part; None where as many processes did not write it.

    Raises:
        CheckpointError: There is no complete checkpoint, a file is damaged, or it is that of another model. Where it
            is damaged, the message names the newest one beside it that is whole.

    Example:
        ```python
        from drivetrain import PartialState
        from drivetrain.checkpoint import load_run_state, save_run_state

        state = PartialState()
        save_run_state("checkpoints/step_7", {"epoch": 1}, {"seen": 28}, state, step=7)
        shared, own = load_run_state("checkpoints/step_7", state)
        ```
    """
    peers = Peers(state)

    def read() -> tuple[Any, Any | None]:
        checkpoint = Checkpoint(directory, verify, storage)
        shared, _ = checkpoint.shared(into, strict, only)
        same_world = state is not None and checkpoint.manifest.world_size == state.num_processes
        own = checkpoint.own(peers.rank) if same_world else None
        if verify == "hash" and only is None:
            checkpoint.verify(checkpoint.tensors.unread())
        return shared, own

    result = peers.attempt(read)
    failure = peers.agree(result if isinstance(result, Failure) else None)
    if failure is not None:
        advice = ""
        if failure.is_damage:
            found = whole_beside(directory, storage) if peers.is_main else ""
            advice = peers.scatter([found] * peers.size if peers.is_main else None)
        peers.fail(failure, f"The checkpoint {os.fspath(directory)} could not be loaded", advice)
    assert not isinstance(result, Failure)
    return result


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether this package has written a checkpoint: only such a one is ever removed.

    A directory has a `MANIFEST.json` of ours then, whole or not, and a file in Lightning's format an entry of ours.

    Args:
        directory: The directory, file or URL.
    """
    storage, path = storage_of(directory)
    if isinstance(storage, LocalStorage) and os.path.isfile(path):
        return extras_at(path) is not None
    return has_manifest(storage, path)


def remove_checkpoint(directory: str | os.PathLike[str], *, storage: Storage | None = None) -> None:
    """Remove a checkpoint, on one process. Nothing is found under its name from the first moment on.

    Only a directory with a `MANIFEST.json` of ours is removed, a link to one, or a file in Lightning's format with an
    entry of ours; never anything else.

    Args:
        directory: The checkpoint's directory, file or URL; nothing happens where there is none.
        storage: Where it is; found from `directory` if None.

    Raises:
        CheckpointError: It could not be removed, or is no checkpoint.
    """
    found, path = storage_of(directory)
    storage = storage or found
    try:
        if not storage.exists(path):
            return
        if isinstance(storage, LocalStorage) and extras_at(path) is not None:
            os.unlink(path)
            return
        check_is_checkpoint(storage, path, "is not removed")
        storage.remove(path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error}.") from error


# What a checkpoint holds, without its tensors' values


def describe_run_state(directory: str | os.PathLike[str]) -> Any:
    """Read what all processes share, with tensors that have a shape and a dtype, and no values (one process).

    Args:
        directory: The checkpoint's directory or URL.

    Returns:
        The state, its tensors on the meta device.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    try:
        return _described(Checkpoint(directory, verify="size"))
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}{whole_beside(directory)}") from error


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    described = checkpoint.tensors.tensors()
    path = checkpoint.tensors.path_of(SHARED_FILE)

    def without_values(key: str) -> torch.Tensor:
        if key not in described:
            raise DamagedCheckpointError(f"{path} is damaged: {INDEX} does not have its tensor {key}.")
        one = described[key]
        return torch.empty(one.size, dtype=one.properties.dtype, device="meta")

    tree: dict[str, Any] = unpack(checkpoint.packed(), without_values, path)
    return tree
