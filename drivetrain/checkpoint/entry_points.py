"""The plain entry points: save the state of a run, and remove what was saved."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from drivetrain.checkpoint.queue import PendingSave, save_queue
from drivetrain.checkpoint.storage import Storage, storage_of
from drivetrain.runtime.errors import CheckpointError
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
    optimizers: Iterable[Optimizer] = (),
) -> PendingSave:
    """Write a checkpoint; call it on all processes. Waits for one that is still being written.

    Args:
        directory: the checkpoint's directory or URL; what has that name is replaced once the new one is complete.
        shared: what is the same on all processes: nested dicts and lists of plain values and tensors. A tensor that
            all have is written once, a sharded DTensor by each process that has a part of it.
        own: what is this process's own, of the same kinds.
        state: this process among its peers.
        step: the optimizer step, by which `newest_checkpoint` finds the newest; `shared["global_step"]` if None.
        block: whether to return only once the checkpoint is there. Else its tensors are copied, may change at once,
            and are written in the background.
        storage: where to; found from `directory` if None.
        extra: a local directory whose content becomes part of the checkpoint; from `extra_place`.
        optimizers: those whose state nothing but their `step()` changes: unless `block` is set, it is copied while
            training goes on, and the next step of any of them waits for what is left.

    Returns:
        The save: done where `block` is true, else to be waited for.

    Raises:
        CheckpointError: any process cannot save or write it, or the save before failed in the background; raised on
            all, and what was there before is intact.
    """
    if step is None and isinstance(shared, dict) and isinstance(shared.get("global_step"), int):
        step = shared["global_step"]
    return save_queue(state).save(
        directory, shared, own, step=step, block=block, storage=storage, extra=extra, optimizers=optimizers
    )


def remove_checkpoint(directory: str | os.PathLike[str], *, storage: Storage | None = None) -> None:
    """Remove a checkpoint, on one process. Nothing is found under its name from the first moment on.

    Args:
        directory: the checkpoint's directory or URL; nothing happens where there is none.
        storage: where it is; found from `directory` if None.

    Raises:
        CheckpointError: it could not be removed.
    """
    found, path = storage_of(directory)
    try:
        (storage or found).remove(path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error}.") from error
