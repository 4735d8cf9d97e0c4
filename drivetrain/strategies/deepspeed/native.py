"""DeepSpeed's own checkpoints: written and read by the engine, and turned into plain weights."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from drivetrain.checkpoint.deepspeed_shards import DeepSpeedShards, deepspeed_folder, read_deepspeed
from drivetrain.checkpoint.export import parse_dtype, save_safetensors, weights_below
from drivetrain.runtime.errors import CheckpointError
from drivetrain.strategies.deepspeed.engine import TrainedModel

_STATES = "*_model_states.pt"
_OPTIMIZER = "*_optim_states.pt"


def save(trained: TrainedModel, directory: str | os.PathLike[str], tag: str) -> None:
    """Let the engine write its checkpoint; collective."""
    trained.engine.save_checkpoint(os.fspath(directory), tag=tag)


def load(trained: TrainedModel, directory: str | os.PathLike[str], tag: str | None, world_size: int) -> None:
    """Let the engine read its checkpoint; collective.

    Raises:
        CheckpointError: There is none, or another number of processes wrote it.
    """
    folder = folder_of(directory, tag)
    written = len(list(folder.glob(_OPTIMIZER)))
    if written not in (0, 1, world_size) or (written == 1 and world_size > 1 and trained.engine.zero_optimization()):
        raise CheckpointError(
            f"{folder} was written by {written} processes, and DeepSpeed reads its own checkpoints on as many only, "
            f"but here are {world_size}. Save with Accelerator.save_state or a Trainer's checkpoints, which any number "
            "reads, or take the weights out: drivetrain merge-weights."
        )
    path, _ = trained.engine.load_checkpoint(os.fspath(directory), tag=folder.name)
    if path is None:
        raise CheckpointError(f"DeepSpeed could not read the checkpoint {folder}.")


def folder_of(directory: str | os.PathLike[str], tag: str | None = None) -> Path:
    """The folder of one checkpoint: by tag, by the file that names the latest one, or the directory itself.

    Raises:
        CheckpointError: There is none.
    """
    found = deepspeed_folder(directory, tag)
    if found is None:
        raise CheckpointError(
            f"{os.fspath(directory)} holds no DeepSpeed checkpoint{f' {tag!r}' if tag else ''}: no {_STATES} files."
        )
    return found


def whole_weights(directory: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights in a DeepSpeed checkpoint in 32 bits, under the names of the model. Nothing in it is executed.

    Raises:
        CheckpointError: There is none.
    """
    weights: dict[str, Tensor] = read_deepspeed(folder_of(directory), DeepSpeedShards.weights)
    if weights and all(name.startswith("task.") for name in weights):
        # A Trainer's engine holds the task in a module of its own.
        weights = {name.removeprefix("task."): value for name, value in weights.items()}
    return weights


def merge_native(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    *,
    module: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> list[str]:
    """Write the weights in a DeepSpeed checkpoint as plain safetensors, in the files that `consolidate` writes.

    Args:
        directory: What the engine has written.
        output: The directory to write to.
        max_shard_size: Bytes in a file at most.
        dtype: What floating-point weights are converted to; 32 bits if None.
        module: Write the weights of this module alone, under the names that they have in it.
        overwrite: Whether to write into a directory that holds something already.
        progress: Whether to show a progress bar.

    Returns:
        The paths of the safetensors files.
    """
    target = parse_dtype(dtype)
    weights = weights_below(whole_weights(directory), module, os.fspath(directory))
    if target is not None:
        weights = {name: value.to(target) if value.is_floating_point() else value for name, value in weights.items()}
    return save_safetensors(weights, output, max_shard_size, overwrite=overwrite, progress=progress)
