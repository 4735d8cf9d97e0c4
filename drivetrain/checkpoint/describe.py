"""What a checkpoint holds, without its tensors' values."""

from __future__ import annotations

import os
from typing import Any

import torch

from drivetrain.checkpoint.discovery import whole_beside
from drivetrain.checkpoint.errors import DamagedCheckpointError
from drivetrain.checkpoint.index import INDEX
from drivetrain.checkpoint.load import Checkpoint
from drivetrain.checkpoint.save import SHARED_FILE
from drivetrain.checkpoint.tree import unpack


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
