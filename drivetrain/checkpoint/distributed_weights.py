"""Weights into a model whose tensors are sharded over processes, or that one process sends to the others."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.weight_files import open_weights, with_tied
from drivetrain.runtime.errors import CheckpointError, ConfigurationError


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is one over several processes."""
    return isinstance(tensor, DTensor)


def load_over_processes(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    dtype: torch.dtype | None,
    strict: bool,
    full: bool,
    broadcast: bool,
    keep_in_fp32: Collection[str] = (),
) -> None:
    """Load weights into a model on all processes; to be called on each of them.

    Args:
        model: The model, whose parameters have memory and may be sharded.
        source: What `open_weights` takes.
        dtype: Convert floating-point weights to it; they get the dtype of the model's if None.
        strict: Whether names that are missing or left over are an error.
        full: Whether the weights are whole tensors, which are sharded as the model's are.
        broadcast: Whether only process 0 reads, and sends each weight to the others.
        keep_in_fp32: Weights with one of these in their names become float32 where `dtype` is smaller.

    Raises:
        CheckpointError: The weights are not those of the model.
        ConfigurationError: Weights are to be sent, and there is no process group.
    """
    if broadcast and not dist.is_initialized():
        raise ConfigurationError(
            "broadcast_from_rank0=True needs a process group. Build an Accelerator first, or leave it out.",
            code="DT-017",
        )

    def dtype_of(name: str, old: torch.dtype | None) -> torch.dtype | None:
        if dtype is None:
            return old
        return torch.float32 if dtype.itemsize < 4 and any(part in name for part in keep_in_fp32) else dtype

    weights: dict[str, Any] = {}
    if not broadcast or dist.get_rank() == 0:
        wanted = model.state_dict()
        for name, weight in with_tied(model, open_weights(source)).items():
            to = dtype_of(name, wanted[name].dtype if name in wanted else None)
            weights[name] = weight.to(to) if weight.is_floating_point() else weight
    if dtype is not None:
        held = chain(model.named_parameters(), model.named_buffers())
        targets = {id(tensor): dtype_of(name, None) for name, tensor in held if tensor.is_floating_point()}
        model._apply(lambda tensor: tensor.to(targets[id(tensor)]) if id(tensor) in targets else tensor)  # type: ignore[no-untyped-call]
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, strict=strict)
    try:
        set_model_state_dict(model, weights, options=options)
    except RuntimeError as error:
        where = "The weights given" if isinstance(source, Mapping) else os.fspath(source)
        raise CheckpointError(f"{where} does not fit {type(model).__name__}: {error}") from error
