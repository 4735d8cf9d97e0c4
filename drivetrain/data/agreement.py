"""What processes agree on batch by batch, where they cannot know it from their loaders alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.data.batch_info import BatchInfo
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.state import PartialState


def sum_over_processes(numbers: Sequence[int]) -> list[int]:
    """Add up integers over all processes, on the host where a backend for it is there."""
    on_host = not dist.is_initialized() or "cpu" in str(dist.get_backend_config())
    device = torch.device("cpu") if on_host else PartialState().device
    total: list[int] = reduce(torch.tensor(numbers, dtype=torch.int64, device=device), "sum").tolist()
    return total


def with_rows_of_all(pairs: Iterator[tuple[Any, BatchInfo]], shards: int) -> Iterator[tuple[Any, BatchInfo]]:
    """Exchange the rows of each step's batches; all processes iterate together, with as many batches.

    Where the rows of any batch of a step cannot be found, its real batches count alike.

    Args:
        pairs: This process's batches, each with what is known about it.
        shards: How many parts the data is read in; processes may read the same part.
    """
    copies = PartialState().num_processes // shards
    for batch, info in pairs:
        is_real = int(not info.is_padding)
        rows = info.real_rows
        unknown, real, total = sum_over_processes([int(rows is None), is_real, rows or 0])
        if unknown:
            info.weights = is_real, real // copies
        else:
            info.global_rows = total // copies
        yield batch, info
