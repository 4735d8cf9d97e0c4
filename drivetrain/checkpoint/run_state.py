"""Saving and loading the state of a run: what all processes share, and what is each one's own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint.directory import new_token, publish, removed_on_error, temporary_beside
from drivetrain.runtime.collectives import broadcast_object_list, gather_object
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.state import PartialState

SHARED_FILE = "state.pt"


def save_run_state(directory: Path, shared: dict[str, Any], own: dict[str, Any], state: PartialState) -> None:
    """Write a checkpoint; call it on all processes.

    Args:
        directory: the checkpoint's directory; replaced where it exists.
        shared: what is the same on all processes; rank 0 writes it.
        own: what is this process's own; each writes it.
        state: this process among its peers.

    Raises:
        CheckpointError: any process could not write; raised on all, and what was there before is intact.
    """
    token = broadcast_object_list([new_token()])[0]
    temporary = temporary_beside(directory, token)
    failure: str | None = None
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        with removed_on_error(temporary):
            torch.save(own, temporary / _own_file(state.process_index))
            if state.is_main_process:
                torch.save(shared, temporary / SHARED_FILE)
    except OSError as error:
        failure = f"rank {state.process_index}: {error}"
    failures = [failed for failed in gather_object([failure]) if failed]
    if not failures and state.is_main_process:
        try:
            publish(temporary, directory)
        except OSError as error:
            failure = f"rank 0: {error}"
    failures += [failed for failed in broadcast_object_list([failure]) if failed]
    if failures:
        raise CheckpointError(f"The checkpoint {directory} could not be written: {'; '.join(failures)}.")


def load_run_state(directory: Path, state: PartialState) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read a checkpoint; nothing in it is unpickled but tensors and plain values.

    Args:
        directory: the checkpoint's directory.
        state: this process among its peers.

    Returns:
        What all processes share, and this process's own part; None where as many processes did not write it.

    Raises:
        CheckpointError: there is no readable checkpoint.
    """
    if not (directory / SHARED_FILE).is_file():
        raise CheckpointError(
            f"There is no checkpoint at {directory}: {SHARED_FILE} is missing. "
            "Give the directory that save_state or ModelCheckpoint wrote."
        )
    shared = _read(directory / SHARED_FILE)
    writers = len(list(directory.glob("process_*.pt")))
    own_path = directory / _own_file(state.process_index)
    return shared, _read(own_path) if writers == state.num_processes and own_path.is_file() else None


def _own_file(rank: int) -> str:
    return f"process_{rank}.pt"


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return content
