"""Weights as other tools write them: safetensors or torch's own files, one or several with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.export import parse_dtype, parse_size
from drivetrain.checkpoint.pickled import read_pickled
from drivetrain.runtime.errors import CheckpointError, ConfigurationError

SAFE, TORCH = "model.safetensors", "pytorch_model.bin"
_INDEX = ".index.json"


def read_weights(path: str | os.PathLike[str], wanted: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Read weights in a file or a directory, onto the CPU. Nothing in a file is executed.

    Args:
        path: A `.safetensors` file, one that `torch.save` wrote, an index of several, or a directory with one of these.
        wanted: The names of those to read; all if None.

    Raises:
        CheckpointError: There are none, or a file holds something else.
    """
    found = _file_in(Path(path)) if os.path.isdir(path) else Path(path)
    if not found.is_file():
        raise CheckpointError(f"There is no file {found}.")
    if not found.name.endswith(_INDEX):
        return _read_file(found, wanted)
    try:
        names = json.loads(found.read_text())["weight_map"]
        files = sorted({str(file) for name, file in names.items() if wanted is None or name in wanted})
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{found} is no index of weights: it has no weight_map.") from error
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        if os.path.basename(file) != file:
            raise CheckpointError(f"{found} names {file!r}, which is not a file beside it.")
        weights.update(_read_file(found.parent / file, wanted))
    return weights


def _file_in(directory: Path) -> Path:
    for name in (SAFE, SAFE + _INDEX, TORCH, TORCH + _INDEX):
        if (directory / name).is_file():
            return directory / name
    alone = [*directory.glob("*.safetensors"), *directory.glob(f"*{_INDEX}")]
    if len(alone) == 1:
        return alone[0]
    raise CheckpointError(
        f"There are no weights in {directory}: expected {SAFE} or {TORCH}, or parts of one with its {_INDEX[1:]}."
    )


def _read_file(path: Path, wanted: Collection[str] | None) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys() if wanted is None or name in wanted}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    weights = read_pickled(path)
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no weights: expected a dict of tensors.")
    return {name: value for name, value in weights.items() if wanted is None or name in wanted}


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
    limit, total = parse_size(max_shard_size), 0
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


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    strict: bool = False,
) -> None:
    """Load weights from files into a model, each tensor onto the device of what it replaces.

    Args:
        model: The model; weights that are tied in it need be there under one of their names only.
        checkpoint: A file, an index, or a directory, as `read_weights` takes it.
        device_map: Only one device for the whole model: `{"": "cuda:0"}`. None keeps parameters where they are.
        dtype: Convert floating-point weights to it.
        strict: Whether names that are missing or left over are an error.

    Raises:
        CheckpointError: The weights cannot be read, or with `strict` are not those of the model.
        ConfigurationError: `device_map` spreads the model over several devices.
    """
    if device_map is not None and set(device_map) != {""}:
        raise ConfigurationError(
            f"device_map={dict(device_map)!r} spreads a model over several devices. Give one device for all of it, as "
            "in {'': 'cuda:0'}, or shard it with strategy='fsdp'."
        )
    weights = with_tied(model, read_weights(checkpoint))
    wanted = parse_dtype(dtype)
    if wanted is not None:
        weights = {name: value.to(wanted) if value.is_floating_point() else value for name, value in weights.items()}
        model.to(wanted)
    if device_map is not None:
        device = torch.device(device_map[""])
        weights = {name: value.to(device) for name, value in weights.items()}
        if not any(value.is_meta for value in model.state_dict().values()):
            model.to(device)
    empty = any(value.is_meta for value in model.state_dict().values())
    try:
        model.load_state_dict(weights, strict=strict, assign=empty)
    except RuntimeError as error:
        raise CheckpointError(f"{os.fspath(checkpoint)} does not fit {type(model).__name__}: {error}") from error


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
