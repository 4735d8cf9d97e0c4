"""What a checkpoint holds, without its tensors' values."""

from __future__ import annotations

import os
from typing import Any

import torch

from drivetrain.checkpoint.load import Checkpoint
from drivetrain.checkpoint.tree import unpack


def describe_run_state(directory: str | os.PathLike[str]) -> Any:
    """Read what all processes share, with tensors that have a shape and a dtype, and no values (one process).

    Args:
        directory: the checkpoint's directory or URL.

    Returns:
        The state, its tensors on the meta device.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    checkpoint = Checkpoint(directory, verify="size")
    described = checkpoint.tensors.tensors()

    def without_values(key: str) -> torch.Tensor:
        one = described[key]
        return torch.empty(one.size, dtype=one.properties.dtype, device="meta")

    return unpack(checkpoint.packed(), without_values)
