"""Properties of data loaders and datasets."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import IterableDataset

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.trainer.hyper_parameters import HyperParameters as AttributeDict

__all__ = ["AttributeDict", "has_iterable_dataset", "has_len", "sized_len", "suggested_max_num_workers"]


def has_iterable_dataset(dataloader: object) -> bool:
    """Return True if a data loader reads an `IterableDataset`."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: object) -> int | None:
    """Return the length of a data loader, or None if it has none."""
    sized: Any = dataloader
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: object) -> bool:
    """Return True if a data loader has a length. Warns if the length is 0."""
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"`{type(dataloader).__name__}` returned 0 length. Please make sure this was your intention.")
    if length is not None and has_iterable_dataset(dataloader):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. Each of several workers must yield a part of it, or there "
            "are more samples than it says."
        )
    return length is not None


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return the number of CPU cores per process, as the limit for data loader workers."""
    if local_world_size < 1:
        raise ValueError(f"`local_world_size` should be >= 1, got {local_world_size}.")
    return max(1, _num_cpus_available() // local_world_size - 1)


def _num_cpus_available() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
