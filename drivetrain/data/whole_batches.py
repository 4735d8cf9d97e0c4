"""Batches of datasets in memory, read at once rather than sample by sample, with the same result."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate

Gather = Callable[[Tensor, Tensor], Tensor]
"""Returns some rows of a tensor: those of the indices that it is given second."""

Read = Callable[[Sequence[int], Gather], Any]
"""Returns what collating the samples of some indices gives, whose rows it gathers with what it is given second."""


class NotAtOnce(Exception):
    """These samples have to be read one by one."""


# What reading at once raises where that is so, or where the indices are wrong.
_REFUSALS = (NotAtOnce, IndexError, TypeError, ValueError, RuntimeError)


def gathered(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor, in memory of their own.

    Args:
        tensor: The tensor.
        index: The rows' indices.
    """
    return tensor.index_select(0, index)


def gathered_pinned(tensor: Tensor, index: Tensor) -> Tensor:
    """The same in page-locked memory, where the tensor is on the host.

    Torch keeps page-locked memory that was freed for later tensors, but hands it out only once the copies to a device
    that were begun from it are done, so a buffer is never overwritten while it is copied.

    Args:
        tensor: The tensor.
        index: The rows' indices.
    """
    if tensor.device.type != "cpu":
        return gathered(tensor, index)
    rows = torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, index, out=rows)


def can_pin() -> bool:
    """Whether torch has page-locked memory here: there is an accelerator, which is not one without it."""
    if not torch.accelerator.is_available():
        return False
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type != "mps"


class WholeBatches(Dataset[Any]):
    """A dataset that gives collated batches: the samples are not made.

    Args:
        dataset: The user's dataset.
        read: What `reads_at_once` found for it.
        gather: What takes rows out of tensors: `gathered_pinned` where no worker reads and batches are to be pinned.
    """

    def __init__(self, dataset: Any, read: Read, gather: Gather = gathered) -> None:
        self.dataset, self._read, self._gather = dataset, read, gather

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.dataset,)  # to a worker that is spawned

    def __getitems__(self, indices: Sequence[int]) -> Any:
        try:
            return self._read(indices, self._gather)
        except _REFUSALS:
            # Read as torch's loader does; where the indices are wrong, with the error that it raises.
            return default_collate(self._samples(indices))

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        if getattr(self.dataset, "__getitems__", None):
            samples: list[Any] = self.dataset.__getitems__(indices)
            return samples
        return [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)


def _again(dataset: Any) -> WholeBatches:
    read = reads_at_once(dataset)
    if read is None:
        raise TypeError(f"A {type(dataset).__name__} is not read by the batch.")
    return WholeBatches(dataset, read)


def reads_at_once(dataset: Any) -> Read | None:
    """What reads a batch of a dataset at once; None where a sample is made by code of the user's, or is no tensor.

    Read at once are tensors, `TensorDataset`, numpy arrays, `StackDataset`, `Subset` and `ConcatDataset` of such, and
    datasets of the package `datasets` in torch's format. What a dataset holds is looked up for each batch, so it may
    be changed between two of them.

    Args:
        dataset: A map-style dataset.
    """
    find = _KINDS.get(type(dataset))
    if find is not None:
        return find(dataset)
    return (lambda indices, gather: _columns(dataset, indices)) if is_table_of_tensors(dataset) else None


def is_table_of_tensors(dataset: Any) -> bool:
    """Whether this is a dataset of the package `datasets` that gives tensors, and runs no code of the user's.

    Args:
        dataset: A map-style dataset.
    """
    return type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] == "torch"


def bytes_of_first(read: Read) -> int | None:
    """Bytes of the tensors in a dataset's first sample; None where it has to be read by itself.

    Args:
        read: What `reads_at_once` found.
    """
    try:
        return _bytes_of(read([0], gathered))
    except _REFUSALS:
        return None


def _bytes_of(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    return sum(map(_bytes_of, batch.values() if isinstance(batch, dict) else batch))


def _of_tensor(tensor: Tensor) -> Read | None:
    return lambda indices, gather: _rows(tensor, _as_index(indices), gather)


def _of_tensors(dataset: Any) -> Read | None:
    def read(indices: Sequence[int], gather: Gather) -> list[Tensor]:
        index = _as_index(indices)
        return [_rows(tensor, index, gather) for tensor in dataset.tensors]

    return read


def _of_array(array: Any) -> Read | None:
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        return None

    def read(indices: Sequence[int], gather: Gather) -> Tensor:
        # Numbers by themselves take another way through collate, which settles their dtype.
        return torch.as_tensor(array[np.asarray(_checked(indices))]) if array.ndim > 1 else _numbers(array, indices)

    return read


def _numbers(array: Any, indices: Sequence[int]) -> Tensor:
    collated: Tensor = default_collate([array[index] for index in indices])
    return collated


def _of_subset(dataset: Any) -> Read | None:
    read = reads_at_once(dataset.dataset)
    if read is None:
        return None
    return lambda indices, gather: read(_some_of(dataset.indices, indices), gather)


def _some_of(all_indices: Any, chosen: Sequence[int]) -> Sequence[int]:
    """Some of a subset's indices, as Python's own numbers also where they are whole numbers of NumPy or torch."""
    if isinstance(all_indices, np.ndarray) and all_indices.dtype.kind in "iu":
        return all_indices[np.asarray(_checked(chosen))].tolist()  # type: ignore[no-any-return]
    if isinstance(all_indices, Tensor) and all_indices.dtype in (torch.int32, torch.int64):
        return all_indices[_as_index(chosen)].tolist()
    return [all_indices[index] for index in chosen]


def _of_stack(dataset: Any) -> Read | None:
    parts = dataset.datasets
    named = isinstance(parts, dict)
    reads = _reads_of(parts.values() if named else parts)
    if reads is None:
        return None
    if named:
        return lambda indices, gather: {name: read(indices, gather) for name, read in zip(parts, reads, strict=True)}
    return lambda indices, gather: [read(indices, gather) for read in reads]


def _of_concatenation(dataset: Any) -> Read | None:
    reads = _reads_of(dataset.datasets)
    if reads is None:
        return None
    return lambda indices, gather: _concatenated(reads, dataset.cumulative_sizes, indices, gather)


def _reads_of(parts: Iterable[Any]) -> list[Read] | None:
    """What reads each of some datasets; None where one of them is read by the sample."""
    reads = [reads_at_once(part) for part in parts]
    known = [read for read in reads if read is not None]
    return known if len(known) == len(reads) else None


def _concatenated(reads: Sequence[Read], ends: Sequence[int], indices: Sequence[int], gather: Gather) -> Any:
    """The rows of several datasets, in the order of their indices in the whole."""
    wanted: dict[int, tuple[list[int], list[int]]] = {}
    for position, index in enumerate(_checked(indices)):
        part = bisect_right(ends, index)
        places, within = wanted.setdefault(part, ([], []))
        places.append(position)
        within.append(index - (ends[part - 1] if part else 0))
    if len(wanted) == 1:
        [(part, (_, within))] = wanted.items()
        return reads[part](within, gather)
    read = [reads[part](within, gathered) for part, (_, within) in wanted.items()]
    order = [position for places, _ in wanted.values() for position in places]
    return _joined(read, torch.tensor(order).argsort(), gather)


def _joined(parts: list[Any], order: Tensor, gather: Gather) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        if any(part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in parts):
            raise NotAtOnce
        return gather(torch.cat(parts), order)
    if any(type(part) is not type(first) or len(part) != len(first) for part in parts):
        raise NotAtOnce
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts], order, gather) for name in first}
    return [_joined(list(each), order, gather) for each in zip(*parts, strict=True)]


def _columns(dataset: Any, indices: Sequence[int]) -> dict[str, Any]:
    columns: dict[str, Any] = dataset[list(indices)]
    if not all(isinstance(column, Tensor) for column in columns.values()):
        raise NotAtOnce
    return dict(columns)


def _rows(tensor: Tensor, index: Tensor, gather: Gather) -> Tensor:
    if tensor.layout is not torch.strided or type(tensor) is not Tensor:
        raise NotAtOnce
    return gather(tensor, index if tensor.device.type == "cpu" else index.to(tensor.device))


def _as_index(indices: Sequence[int]) -> Tensor:
    return torch.tensor(_checked(indices))


def _checked(indices: Sequence[int]) -> Sequence[int]:
    """The indices, where they are numbers from 0: others mean something else to each kind of dataset."""
    if not indices or min(indices) < 0 or type(indices[0]) is not int:
        raise NotAtOnce
    return indices


_KINDS: dict[type, Callable[[Any], Read | None]] = {
    Tensor: _of_tensor,
    TensorDataset: _of_tensors,
    np.ndarray: _of_array,
    Subset: _of_subset,
    StackDataset: _of_stack,
    ConcatDataset: _of_concatenation,
}
