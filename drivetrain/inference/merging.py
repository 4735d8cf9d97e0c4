"""Merging of LoRA adapters into the base weights, in blocks of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.checkpoint.export import Weights, open_weights, parse_dtype, write_safetensors
from drivetrain.checkpoint.storage import BLOCK
from drivetrain.checkpoint.tree import Entry
from drivetrain.inference.loading import Checkpoint
from drivetrain.runtime.errors import CheckpointError

# Suffixes of an adapter's matrices and scale, first for `LoRALinear`, then for peft's layers.
_ENDINGS = (
    (".lora_A", ".lora_B", ".scaling"),
    (".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.scaling"),
)


class Adapter(NamedTuple):
    first: str
    second: str
    scale: str


def adapters_in(weights: Mapping[str, Any]) -> dict[str, Adapter]:
    found = {}
    for name in weights:
        for first, second, scale in _ENDINGS:
            layer = name.removesuffix(first)
            adapter = Adapter(name, layer + second, layer + scale)
            if layer != name and all(each in weights for each in adapter):
                found[layer] = adapter
    return found


def merge_adapters(
    checkpoint: Checkpoint,
    weights: Checkpoint,
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    overwrite: bool = True,
    *,
    dtype: torch.dtype | str | None = None,
    model: int | None = None,
    progress: bool = False,
) -> list[str]:
    """Merge LoRA adapters into their base weights, and save safetensors files.

    Parameters that were trained in full, such as those of norms, replace the ones in `weights`. Weights are read and
    written in blocks of rows, so no full weight is in memory.

    Args:
        checkpoint: A checkpoint of a run with adapters, or a file of adapters.
        weights: The unquantized base weights.
        output: Folder for the files.
        max_shard_size: Maximum bytes of one file, as a number or as text such as `"5GB"`.
        overwrite: Allow a folder that is not empty.
        dtype: Dtype of the written floating-point weights, such as `"bfloat16"`. None keeps each weight's dtype.
        model: Index of the model, if the checkpoint contains several.
        progress: Show a progress bar.

    Returns:
        The paths of the safetensors files.

    Raises:
        CheckpointError: The checkpoint has no adapters, or the weights lack their layers or have other shapes.
        ConfigurationError: `max_shard_size` is not a size.
    """
    trained, base = open_weights(checkpoint, model), open_weights(weights)
    adapters = adapters_in(trained)
    if not adapters:
        raise CheckpointError(f"{trained.where} has no adapters, such as 'layer.lora_A'. Check its path.")
    prefix = _prefix(adapters, base, trained.where, base.where)
    by_weight = {f"{layer.removeprefix(prefix)}.weight": adapter for layer, adapter in adapters.items()}
    for name, (first, second, _) in by_weight.items():
        shape = (trained.entries[second].shape[0], trained.entries[first].shape[1])
        if shape != base.entries[name].shape:
            raise CheckpointError(
                f"Shape mismatch for {name!r}: the adapter needs {shape}, but {base.where} has "
                f"{base.entries[name].shape}. Use the weights that the adapter was trained on."
            )
    target = parse_dtype(dtype)
    tied = {name: other for name, other in base.tied().items() if name not in by_weight and other not in by_weight}
    # The adapter changes only its own layer: a tied weight elsewhere is written separately and unchanged.
    apart = {name: base.entries[other] for name, other in base.same.items() if name not in tied}
    sources = []
    for name, entry in {**base.entries, **apart}.items():
        if name in tied:
            continue
        written = target if target is not None and entry.dtype.is_floating_point else entry.dtype
        source, key = base, base.same[name] if name in apart else name
        whole = None if name in by_weight else trained.entries.get(prefix + name)
        if whole is not None:  # a parameter that was trained itself
            source, key = trained, prefix + name
            if whole.shape != entry.shape:
                raise CheckpointError(f"Shape mismatch for {key!r}: {whole.shape} trained, {entry.shape} in the base.")
        blocks = partial(_blocks, source, key, written, trained, by_weight.get(name))
        sources.append((Entry(name, written, entry.shape), blocks))
    return write_safetensors(sources, tied, output, max_shard_size, overwrite=overwrite, progress=progress)


def _blocks(
    base: Weights, name: str, dtype: torch.dtype, trained: Weights, adapter: Adapter | None
) -> Iterator[Tensor]:
    weight = base[name]
    if weight.dim() == 0:
        yield weight.to(dtype)
        return
    step = max(1, BLOCK // max(1, weight[:1].numel() * 4))
    if adapter is None:
        yield from (weight[start : start + step].to(dtype) for start in range(0, len(weight), step))
        return
    first, second, scale = (trained[each].float() for each in adapter)
    for start in range(0, len(weight), step):
        # In float32; only the sum is rounded to the target dtype.
        rows = (second[start : start + step] @ first).mul_(scale).add_(weight[start : start + step])
        yield rows.to(dtype)


def _prefix(adapters: Mapping[str, Any], weights: Mapping[str, Any], trained: str, base: str) -> str:
    first = next(iter(adapters))
    parts = first.split(".")
    for count in range(len(parts)):
        # A checkpoint may have the model under an attribute, whose name precedes all others.
        prefix = ".".join(parts[:count]) + "." if count else ""
        if all(f"{layer.removeprefix(prefix)}.weight" in weights for layer in adapters):
            return prefix
    raise CheckpointError(f"{trained} has an adapter for {first}, but {base} has no weight {first}.weight.")
