"""Weights as other tools write them: safetensors or torch's own files, one or several with an index."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from drivetrain.checkpoint.entry_points import is_checkpoint
from drivetrain.checkpoint.export import shard_limit
from drivetrain.checkpoint.locations import storage_of
from drivetrain.checkpoint.mapped_file import MappedFile
from drivetrain.checkpoint.pickled import read_pickled
from drivetrain.checkpoint.storage import MANIFEST, LocalStorage, Storage
from drivetrain.checkpoint.weight_sources import (
    CheckpointWeights,
    FileWeights,
    HeldWeights,
    JoinedWeights,
    RemoteWeights,
    Weights,
)
from drivetrain.runtime.errors import CheckpointError

SAFE, TORCH = "model.safetensors", "pytorch_model.bin"
_INDEX = ".index.json"


def open_weights(source: str | os.PathLike[str] | Mapping[str, torch.Tensor], model: int | None = None) -> Weights:
    """Open weights without reading them. Nothing in a file is executed.

    Args:
        source: A `.safetensors` file, one that `torch.save` wrote, an index of several, a directory with one of these,
            a checkpoint of drivetrain's, a URL of one of them on a file system of fsspec, or tensors by name.
        model: Which of a checkpoint's models, from 0; it has only one if None.

    Raises:
        CheckpointError: There are none, a file is truncated or holds something else, or an index names what is not
            there.
    """
    if isinstance(source, Mapping):
        return source if isinstance(source, Weights) else HeldWeights(source, "the weights given")
    storage, path = storage_of(source)
    if not isinstance(storage, LocalStorage):
        return _open_remote(storage, path, model)
    try:
        return _open_local(path, model)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error


def _open_local(path: str, model: int | None) -> Weights:
    if os.path.isdir(path):
        if is_checkpoint(path):
            return CheckpointWeights(path, model)
        found = _choose([entry.name for entry in Path(path).iterdir() if entry.is_file()], path)
        if found == MANIFEST:
            return CheckpointWeights(path, model)
        path = os.path.join(path, found)
    if not os.path.isfile(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)  # raises what else keeps it from being seen
        raise CheckpointError(f"There is no file {path}.")
    if not path.endswith(".json"):
        return _open_file(path)
    parts = files_of_index(Path(path).read_bytes(), path)
    return _joined(parts, {file: _open_file(os.path.join(os.path.dirname(path), file)) for file in _each(parts)}, path)


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read all weights in a file or a directory, onto the CPU. Nothing in a file is executed.

    Args:
        path: What `open_weights` takes.

    Raises:
        CheckpointError: There are none, or a file holds something else.
    """
    weights = open_weights(path)
    read = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in weights.entries.items()}
    weights.fill(read)
    return read


def files_of_index(content: bytes, path: str) -> dict[str, str]:
    """Return the file beside an index of weights that holds each weight, by the weight's name.

    Args:
        content: The index, as JSON.
        path: Its path, for messages.

    Raises:
        CheckpointError: It is no index, or names something that is no file beside it.
    """
    try:
        found = json.loads(content)
        parts = found.get("weight_map", found)  # or the map alone
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of weights: it has no weight_map.") from error
    if not isinstance(parts, dict) or not all(isinstance(file, str) for file in parts.values()):
        raise CheckpointError(f"{path} is no index of weights: its weight_map does not lead from names to files.")
    for file in parts.values():
        if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(f"{path} names {file!r}, which is not a file beside it.")
    return parts


def _choose(names: list[str], directory: str) -> str:
    """The file that holds the weights in a directory or leads to them; a checkpoint's manifest, where there is none."""
    for name in (SAFE, SAFE + _INDEX, TORCH, TORCH + _INDEX):
        if name in names:
            return name
    alone = [name for name in names if name.endswith((".safetensors", _INDEX))]
    if len(alone) == 1:
        return alone[0]
    indices = [name for name in alone if name.endswith(_INDEX)]
    if len(indices) == 1:
        return indices[0]
    if MANIFEST in names:  # which cannot be read, or is damaged
        return MANIFEST
    raise CheckpointError(
        f"There are no weights in {directory}: expected {SAFE} or {TORCH}, or parts of one with its {_INDEX[1:]}."
    )


def _open_file(path: str) -> Weights:
    if path.endswith(".safetensors"):
        return FileWeights(MappedFile(path))
    return _held(read_pickled(path, mapped=True), path)


def _held(weights: object, path: str) -> HeldWeights:
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no weights: expected a dict of tensors.")
    return HeldWeights(weights, path)


def _open_remote(storage: Storage, path: str, model: int | None) -> Weights:
    if storage.is_directory(path):
        if is_checkpoint(path):
            return CheckpointWeights(path, model)
        found = _choose([name for name in storage.sizes(path) if "/" not in name], path)
        if found == MANIFEST:
            return CheckpointWeights(path, model)
        path = storage.join(path, found)
    if not path.endswith(".json"):
        return _open_remote_file(storage, path)
    parts = files_of_index(storage.read(path), path)
    parent = storage.parent(path)
    return _joined(parts, {file: _open_remote_file(storage, storage.join(parent, file)) for file in _each(parts)}, path)


def _each(parts: Mapping[str, str]) -> list[str]:
    return sorted(set(parts.values()))


def _joined(parts: Mapping[str, str], opened: Mapping[str, Weights], path: str) -> Weights:
    """The weights of several files, all of them, and each that the index names from the file that it names."""
    for name, file in parts.items():
        if name not in opened[file]:
            raise CheckpointError(f"{path} says that {name} is in {file}, which does not hold it.")
    found = {name: each for each in opened.values() for name in each}
    return JoinedWeights(found | {name: opened[file] for name, file in parts.items()}, path)


def _open_remote_file(storage: Storage, path: str) -> Weights:
    if path.endswith(".safetensors"):
        return RemoteWeights(storage, path)
    return _held(read_pickled(path, data=io.BytesIO(storage.read(path))), path)


def save_pickled_weights(
    weights: Mapping[str, torch.Tensor], directory: str | os.PathLike[str], max_shard_size: int | str
) -> list[str]:
    """Write weights as `torch.load` reads them: one `pytorch_model.bin`, or several and their index.

    Args:
        weights: Tensors by name.
        directory: Where to.
        max_shard_size: Bytes in a file at most, such as `"5GB"`; a larger tensor has a file of its own.

    Returns:
        The paths of the files.
    """
    limit, total = shard_limit(max_shard_size), 0
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        more = tensor.numel() * tensor.element_size()
        if shards[-1] and size + more > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.clone()  # a view would take its whole storage along
        size, total = size + more, total + more
    os.makedirs(directory, exist_ok=True)
    stem, suffix = os.path.splitext(TORCH)
    names = [f"{stem}-{n + 1:05d}-of-{len(shards):05d}{suffix}" for n in range(len(shards))] if shards[1:] else [TORCH]
    paths = [os.path.join(directory, name) for name in names]
    for path, shard in zip(paths, shards, strict=True):
        torch.save(shard, path)
    if shards[1:]:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        Path(directory, TORCH + _INDEX).write_text(json.dumps(index, indent=2))
    return paths


def with_tied(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with those added that the model ties to one of them, which files hold once.

    Args:
        model: The bare model.
        weights: Tensors by name.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    filled = dict(weights)
    for tied in names.values():
        held = next((name for name in tied if name in weights), None)
        if held is not None:
            filled.update({name: weights[held] for name in tied if name not in weights})
    return filled
