"""Functions that save, load, describe and import the state of a run."""

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
    """Save a run's nested state of tensors and plain values as a checkpoint that `load_run_state` can read.

    Call it on all processes. It first waits until the previous save has ended.

    Args:
        directory: The checkpoint's directory or URL. An existing checkpoint is replaced after the new one is complete.
        shared: State that is equal on all processes: nested dicts and lists of plain values and tensors. A replicated
            tensor is written once. Of a sharded DTensor, each process writes its shards.
        own: State of this process alone, of the same types.
        state: The process state of the run.
        step: The optimizer step, by which `newest_checkpoint` orders checkpoints. None uses `shared["global_step"]`.
        block: True to return after the checkpoint is written. False to copy the tensors and write them in the
            background.
        storage: The storage to write to. None selects it from `directory`.
        extra: A local directory whose content becomes part of the checkpoint, created by `extra_place`.
        optimizers: Deprecated, without effect. All state is copied before the call returns.

    Returns:
        A handle of the save. It is done if `block` is True. Otherwise call its `wait`.

    Raises:
        CheckpointError: A process cannot save its state, or the previous background save failed. All processes raise
            the error, and an existing checkpoint stays intact.
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
    """Load the nested state that `save_run_state` has saved as a checkpoint, without unpickling any objects.

    Args:
        directory: The checkpoint's directory or URL.
        state: The process state of the run. All processes must then call the function, and an error of one is raised on
            all. None if a single process loads.
        into: Some top-level entries of the shared state, with tensors to fill in place. They may be sharded.
        strict: True to raise an error if tensors of these entries are missing, unexpected or have another shape.
        only: The top-level entries of the shared state to load, or paths of two names such as `"engine/models"`. None
            loads all. Files that are not needed are not read.
        verify: `"hash"` checks the SHA-256 of every file. `"size"` checks only sizes, for example after
            `newest_checkpoint`.
        storage: The storage to read from. None selects it from `directory`.

    Returns:
        The shared state, and this process's own state. The latter is None if another number of processes wrote the
            checkpoint.

    Raises:
        CheckpointError: There is no complete checkpoint, a file is damaged, or the checkpoint belongs to another model.
            If it is damaged, the message names the newest intact checkpoint next to it.

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
        # Files from which tensors were read have been checked already.
        if verify == "hash" and only is None:
            checkpoint.verify(checkpoint.tensors.unread())
        return shared, own

    result = peers.attempt(read)
    failure = peers.agree(result if isinstance(result, Failure) else None)
    if failure is not None:
        advice = ""
        if failure.is_damage:
            # Only rank 0 searches, so that all ranks raise an error with one text.
            found = whole_beside(directory, storage) if peers.is_main else ""
            advice = peers.scatter([found] * peers.size if peers.is_main else None)
        peers.fail(failure, f"The checkpoint {os.fspath(directory)} could not be loaded", advice)
    assert not isinstance(result, Failure)
    return result


# State of a checkpoint without the values of its tensors


def describe_run_state(directory: str | os.PathLike[str]) -> Any:
    """Return the names, shapes and dtypes in a checkpoint: its shared state with tensors on the meta device.

    Call it on one process.

    Args:
        directory: The checkpoint's directory or URL.

    Returns:
        The shared state. Its tensors have shapes and dtypes but no data.

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
            raise DamagedCheckpointError(f"{path} is damaged: {INDEX} does not list the tensor {key}.")
        one = described[key]
        return torch.empty(one.size, dtype=one.properties.dtype, device="meta")

    tree: dict[str, Any] = unpack(checkpoint.packed(), without_values, path)
    return tree


# Reading on a single process, in drivetrain's or another tool's format


def read_processes(path: str | os.PathLike[str]) -> tuple[int, Callable[[int], Any]]:
    """Return how many processes saved a checkpoint, and a function that reads the state that a given rank saved.

    Args:
        path: The checkpoint's directory, file or URL.

    Raises:
        CheckpointError: There is no complete drivetrain checkpoint.
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
    """Load the states of models, optimizers and loops from a checkpoint of drivetrain or of another known tool.

    Args:
        path: The checkpoint.
        only: The required entries. Others may be returned too.
        given: Names of hyper-parameters that are not needed. See `read_foreign`.

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
    """Convert a checkpoint of another tool to a drivetrain checkpoint.

    The source is a folder of `save_state`, also with FSDP shards, or a `.ckpt` file.

    Call it on one process. `Accelerator.load_state` and `Trainer.fit(resume=...)` accept the result. No code from the
    files is executed. Only the main process's random state is kept, for a run of one process. A `.ckpt` file has none.

    Args:
        source: The directory, or the file or its folder of shards.
        output: The new checkpoint's directory. It must not exist yet.

    Returns:
        `output`.

    Raises:
        CheckpointError: `source` has no known format, or a file cannot be read.
        ConfigurationError: `output` already exists.

    Example:
        ```text
        import_checkpoint("old/step_1000", "run/step_1000")
        ```
    """
    found = read_foreign(source)
    if found is None:
        raise CheckpointError(
            f"{os.fspath(source)} is not a checkpoint that can be converted. Pass a directory that Accelerate's "
            "save_state wrote, with its random states, or a Lightning .ckpt file."
        )
    if Path(output).exists():
        raise ConfigurationError(f"{os.fspath(output)} is there already. Name a new directory, or remove it.")
    shared, own = found
    step = shared["driver"].get("progress", {}).get("global_step")
    save_run_state(output, shared, own or {}, PartialState(cpu=True), step=step, block=True)
    return os.fspath(output)
