"""Batches of a `TensorDataset`, read at once rather than sample by sample, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

Gather = Callable[[Tensor, Tensor], Tensor]
"""Returns the rows of a tensor at some indices."""

_OWN_READING = {kind: kind.__getitem__ for kind in (TensorDataset, Subset)}


def gathered(tensor: Tensor, index: Tensor) -> Tensor:
    """Copy the rows of a tensor at some indices."""
    return tensor.index_select(0, index)


def gathered_pinned(tensor: Tensor, index: Tensor) -> Tensor:
    """Copy the rows of a tensor at some indices into pinned memory if the tensor is on the CPU.

    Torch reuses pinned memory that was freed only once the copies to a device that were begun from it are done, so a
    buffer is never overwritten while it is copied.
    """
    if tensor.device.type != "cpu":
        return gathered(tensor, index)
    rows = torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, index, out=rows)


def can_pin() -> bool:
    """Return whether there is an accelerator for which torch pins memory."""
    if not torch.accelerator.is_available():
        return False
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type != "mps"


class WholeBatches(Dataset[Any]):
    """A dataset that gives collated batches of another one, and makes no samples if it can.

    What the user's dataset is and holds is looked up for each batch, so both may be changed between two of them.

    Args:
        dataset: The user's dataset, for which `may_be_read_at_once` is True.
        gather: Takes rows out of tensors: `gathered_pinned` if no worker reads and batches are to be pinned.
    """

    def __init__(self, dataset: Any, gather: Gather = gathered) -> None:
        self.dataset, self._gather = dataset, gather

    def __reduce__(self) -> tuple[Any, ...]:
        return WholeBatches, (self.dataset,)  # to a worker that is spawned

    def __getitems__(self, indices: Sequence[int]) -> Any:
        try:
            batch = read_at_once(self.dataset, indices, self._gather)
        except (IndexError, TypeError, ValueError, RuntimeError):
            batch = None  # a wrong index is then the error that torch's loader raises
        return default_collate(self._samples(indices)) if batch is None else batch

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        if getattr(self.dataset, "__getitems__", None):
            samples: list[Any] = self.dataset.__getitems__(indices)
            return samples
        return [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)


def may_be_read_at_once(dataset: Any) -> bool:
    """Return whether a dataset is a `TensorDataset`, or a `Subset` of one, as torch has them."""
    while _is_as_in_torch(dataset, Subset):
        dataset = dataset.dataset
    return _is_as_in_torch(dataset, TensorDataset)


def read_at_once(dataset: Any, indices: Sequence[int], gather: Gather = gathered) -> list[Tensor] | None:
    """Return what torch's default collate gives for some samples; None if they have to be read one by one.

    Args:
        dataset: A map-style dataset.
        indices: The samples' indices.
        gather: Takes rows out of tensors.
    """
    while _is_as_in_torch(dataset, Subset):
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    if not indices or not _is_as_in_torch(dataset, TensorDataset) or not _collates_as_in_torch():
        return None
    if any(type(tensor) is not Tensor or tensor.layout is not torch.strided for tensor in dataset.tensors):
        return None
    numbers = np.array(indices)  # torch.tensor takes seven times as long for a list
    if numbers.dtype.kind != "i":
        return None
    index = torch.from_numpy(numbers.astype(np.int64, copy=False))
    return [gather(each, index if each.device.type == "cpu" else index.to(each.device)) for each in dataset.tensors]


def _is_as_in_torch(dataset: Any, kind: type) -> bool:
    """Return whether a dataset is exactly of a class of torch's, and neither it nor the class reads in another way."""
    return type(dataset) is kind and "__getitems__" not in vars(dataset) and kind.__getitem__ is _OWN_READING[kind]


def _collates_as_in_torch() -> bool:
    """Return whether tuples of tensors are collated by torch's own functions: a script may register others."""
    plain = default_collate_fn_map.get(Tensor) is collate_tensor_fn
    return plain and not any(isinstance((), kind) for kind in default_collate_fn_map)
