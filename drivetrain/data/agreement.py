"""What processes agree on batch by batch, where their loaders alone do not determine it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.data.batch_info import BatchInfo
from drivetrain.runtime.collectives import gather_object, reduce
from drivetrain.runtime.errors import DataError
from drivetrain.runtime.state import PartialState

Pair = tuple[Any, BatchInfo]

_NONE_LEFT: Any = (None, None)


def sum_over_processes(numbers: Sequence[int]) -> list[int]:
    """Add up integers over all processes, on the host where a backend for it is there."""
    on_host = not dist.is_initialized() or "cpu" in str(dist.get_backend_config())
    device = torch.device("cpu") if on_host else PartialState().device
    total: list[int] = reduce(torch.tensor(numbers, dtype=torch.int64, device=device), "sum").tolist()
    return total


def ending_together(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """The same batches, each handed out once it is known to be the last one on every process or on none.

    Not only once every process has one: a window of micro-batches ends early with the last batch, and with it the
    gradients are reduced.

    Raises:
        DataError: Some processes have no batch left, and others have.
    """
    given, world = 0, PartialState().num_processes
    held: list[Pair] = []  # nothing while this waits to be asked for the next
    for batch, info in chain(pairs, repeat(_NONE_LEFT)):
        has_one = info is not None
        has_more = has_one and not info.last
        given += has_one
        if any(0 < count < world for count in sum_over_processes([has_one, has_more])):
            raise DataError(_different_ends(gather_object([(given, has_more)])))
        if has_one:
            held.append((batch, info))
            del batch
            yield held.pop()
        if not has_more:
            return


def _different_ends(ends: list[tuple[int, bool]]) -> str:
    counts = ", ".join(
        f"rank {rank} has more than {given}" if has_more else f"rank {rank} has {given}"
        for rank, (given, has_more) in enumerate(ends)
    )
    return (
        f"The processes have different numbers of batches in this epoch: {counts}. They step together, so each needs "
        "as many as the others: let every process's dataset end after as many batches, or stop them all at the "
        "smallest number, as with limit_train_batches."
    )


def with_rows_of_all(pairs: Iterator[Pair], shards: int) -> Iterator[Pair]:
    """Exchange the rows of each step's batches; all processes iterate together, with as many batches.

    Where the rows of any batch of a step cannot be found, its real batches count alike.

    Args:
        pairs: This process's batches, each with what is known about it.
        shards: How many parts the data is read in; processes may read the same part.
    """
    copies = PartialState().num_processes // shards

    def exchange(pair: Pair) -> Pair:
        _, info = pair
        is_real = int(not info.is_padding)
        rows = info.real_rows
        unknown, real, total = sum_over_processes([int(rows is None), is_real, rows or 0])
        if unknown:
            info.weights = is_real, real // copies
        else:
            info.global_rows = total // copies
        return pair

    return map(exchange, pairs)
