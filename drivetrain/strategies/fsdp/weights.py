"""Reading weights from files, each process the slices that its shards are of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.schema import find_places, in_schema
from drivetrain.checkpoint.weight_files import files_of_index
from drivetrain.runtime.errors import CheckpointError
from drivetrain.strategies.fsdp.parameters import local_slices

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_weights(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
    """Fill a model's parameters and buffers, whole or sharded, from files; only slices are read.

    Args:
        model: The bare model, whose parameters are allocated.
        path: A safetensors file; a directory with `model.safetensors`, or several with their index; or a checkpoint
            of this library.
        strict: Whether names that are missing or left over are an error.

    Raises:
        CheckpointError: There are no such files, or they are another model's.
    """
    place = Path(path)
    wanted = tensors_by_names(model)
    if place.is_dir() and not ((place / _INDEX).exists() or (place / _SINGLE).exists()):
        _from_checkpoint(wanted, place, strict)
        return
    files = _files_of(place)
    pairs, missing = [], []
    for names, tensor in wanted:
        found = next((name for name in names if name in files), None)
        if found is None:
            missing.append(names[0])
        else:
            pairs.append((found, tensor))
    left_over = sorted(set(files) - {name for names, _ in wanted for name in names})
    if strict and (missing or left_over):
        raise CheckpointError(
            f"{place} holds the weights of another model: not in it: {missing[:8]}; only in it: {left_over[:8]}. "
            "Build the model as it was, or load with strict=False."
        )
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for name, tensor in pairs:
        by_file.setdefault(files[name], []).append((name, tensor))
    for file, held in by_file.items():
        _read(file, held)


def tensors_by_names(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Each parameter and saved buffer of a model with all of its names; tied ones have several."""
    names: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(names.values())


def _files_of(place: Path) -> dict[str, Path]:
    """Which file each tensor is in."""
    from safetensors import safe_open

    if place.is_dir():
        index = place / _INDEX
        if index.exists():
            mapping = files_of_index(index.read_bytes(), os.fspath(index))
            return {name: place / file for name, file in mapping.items()}
        place = place / _SINGLE
    if not place.exists():
        raise CheckpointError(
            f"There are no weights at {place}. Give a safetensors file, a directory with {_SINGLE} or {_INDEX}, or a "
            "checkpoint."
        )
    with safe_open(place, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), place)


@torch.no_grad()
def _read(file: Path, held: Iterable[tuple[str, Tensor]]) -> None:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for name, tensor in held:
            part: Any = opened.get_slice(name)
            if tuple(part.get_shape()) != tuple(tensor.shape):
                raise CheckpointError(
                    f"{file}: {name} is of shape {tuple(part.get_shape())}, but {tuple(tensor.shape)} in the model."
                )
            if not isinstance(tensor, DTensor):
                tensor.copy_(opened.get_tensor(name))
            elif tensor.to_local().numel():
                tensor.to_local().copy_(part[local_slices(tensor)])


def _from_checkpoint(wanted: list[tuple[list[str], Tensor]], place: Path, strict: bool) -> None:
    checkpoint = Checkpoint(place)
    state = {name: tensor.detach() for names, tensor in wanted for name in names}
    packed = checkpoint.packed()
    models = in_schema(packed)["engine"].get("models")
    if not isinstance(models, list) or len(models) != 1:
        raise CheckpointError(
            f"{place} holds {len(models) if isinstance(models, list) else 'no'} models, not one. Load it with "
            "load_state, or export one with Accelerator.save_model."
        )
    places = find_places(packed)
    checkpoint.shared(places.into("models", [state]), strict, only=[places.models])
