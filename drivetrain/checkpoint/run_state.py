"""The plain entry points: save the state of a run, load it, and remove what was saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from drivetrain.checkpoint.discovery import whole_beside
from drivetrain.checkpoint.formats import read_foreign, written_file
from drivetrain.checkpoint.load import Checkpoint, Verify
from drivetrain.checkpoint.manifest import in_schema
from drivetrain.checkpoint.save import SHARED_FILE, Failure, Peers, PendingSave, save_queue
from drivetrain.checkpoint.storage import LocalStorage, Storage, storage_of
from drivetrain.checkpoint.tree import INDEX, unpack
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
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


# Checkpoints of this package or of another tool, read alone


def read_processes(path: str | os.PathLike[str]) -> tuple[int, Callable[[int], Any]]:
    """How many processes wrote a checkpoint of this package, and a function that reads what each kept of its own.

    Args:
        path: The directory, the file, or the URL.

    Raises:
        CheckpointError: There is no complete checkpoint of this package.
    """
    storage, place = storage_of(path)
    file = written_file(os.path.realpath(place)) if isinstance(storage, LocalStorage) else None
    if file is not None:
        return file.world_size, file.own
    written = Checkpoint(path, verify="size")
    return written.manifest.world_size, written.own


def read_shared(
    path: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
    only: Collection[str] | None = None,
    given: Collection[str] | None = (),
) -> dict[str, Any]:
    """Read the shared state of a checkpoint, whichever tool wrote it, alone.

    Args:
        path: The checkpoint.
        only: The entries that are wanted; others may be there, too.
        given: The hyper-parameters that are not needed; see `read_foreign`.

    Returns:
        The state in the schema of `drivetrain.checkpoint.manifest`.

    Raises:
        CheckpointError: There is no complete checkpoint, or it cannot be read.
    """
    foreign = read_foreign(path, given=given)
    if foreign is not None:
        return foreign[0]
    assert isinstance(path, str | os.PathLike)
    return in_schema(load_run_state(path, only=only)[0])


def import_checkpoint(source: str | os.PathLike[str], output: str | os.PathLike[str]) -> str:
    """Convert the checkpoint of another tool: a folder of `save_state`, also with FSDP's shards, or a `.ckpt` file.

    For one process. `Accelerator.load_state` and `Trainer.fit(resume=...)` take the result. Nothing in the files is
    executed. Of random states that of the main process is kept, for a run of one process; a `.ckpt` has none.

    Args:
        source: The directory, or the file or its folder of shards.
        output: The new checkpoint's directory, which must not be there yet.

    Returns:
        `output`.

    Raises:
        CheckpointError: `source` is neither, or a file cannot be read.
        ConfigurationError: `output` is there already.

    Example:
        ```text
        import_checkpoint("old/step_1000", "run/step_1000")
        ```
    """
    found = read_foreign(source)
    if found is None:
        raise CheckpointError(
            f"{os.fspath(source)} is no checkpoint of another tool that can be converted. Give the directory of a "
            "save_state with its random states, or a .ckpt file."
        )
    if Path(output).exists():
        raise ConfigurationError(f"{os.fspath(output)} is there already. Name a new directory, or remove it.")
    shared, own = found
    step = shared["driver"].get("progress", {}).get("global_step")
    save_run_state(output, shared, own or {}, PartialState(cpu=True), step=step, block=True)
    return os.fspath(output)
