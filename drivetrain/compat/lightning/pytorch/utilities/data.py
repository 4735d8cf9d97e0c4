"""Sizes of batches and data loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from drivetrain.compat.lightning.fabric.utilities.data import sized_len
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.runtime.errors import ConfigurationError as MisconfigurationException

warning_cache: set[str] = set()
"""What `extract_batch_size` has warned of already."""


def extract_batch_size(batch: Any) -> int:
    """Return the batch size: the first dimension of the batch's first tensor."""
    found = list(_row_counts(batch))
    if not found:
        raise MisconfigurationException(
            "We could not infer the batch_size from the batch, in which there is no tensor. Either simplify its "
            "structure or give it as `self.log(..., batch_size=batch_size)`."
        )
    if len(set(found)) > 1:
        warning = (
            "Trying to infer the `batch_size` from an ambiguous collection, whose tensors have several sizes. The "
            f"batch size we found is {found[0]}. Give it as `self.log(..., batch_size=batch_size)`."
        )
        if warning not in warning_cache:
            warning_cache.add(warning)
            rank_zero_warn(warning)
    return found[0]


def _row_counts(batch: Any) -> Iterator[int]:
    if isinstance(batch, torch.Tensor):
        yield batch.shape[0] if batch.dim() else 1
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _row_counts(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _row_counts(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _row_counts(getattr(batch, field.name))


def has_len_all_ranks(
    dataloader: Any, strategy: Any, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Return True if the loader has a length above 0 on every process. Call it on all processes."""
    length = sized_len(dataloader)
    if length is None:
        return False
    total = int(strategy.topology.sum(torch.tensor([length], device=strategy.topology.device)).item())
    name = type(dataloader).__name__
    if total == 0:
        rank_zero_warn(f"Total length of `{name}` across ranks is zero. Please make sure this was your intention.")
    if total > 0 and length == 0 and not allow_zero_length_dataloader_with_multiple_devices:
        raise RuntimeError(
            f"`{name}` within local rank has zero length. Please make sure that it returns at least 1 batch."
        )
    return True
