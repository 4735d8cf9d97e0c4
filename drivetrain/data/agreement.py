"""What processes agree on batch by batch, where their loaders alone do not determine it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Subset

from drivetrain.data.batch_info import BatchInfo
from drivetrain.runtime.collectives import gather_object, reduce
from drivetrain.runtime.errors import DataError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState

logger = get_logger(__name__)

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


def digest_of(samples: Any) -> str:
    """Return a digest of samples that does not depend on the process.

    Of an object of another kind it has the bytes (`tobytes`, as images have) or the attributes.
    """
    digest, seen = hashlib.blake2b(digest_size=16), set[int]()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(repr((value.shape, value.dtype)).encode())
            if value.layout is torch.strided and not value.is_quantized:
                value = value.detach().cpu().flatten().contiguous().resolve_conj().resolve_neg()
                digest.update(value.view(torch.uint8).numpy())
        elif isinstance(value, Mapping):
            add(list(value.items()))
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        elif isinstance(value, np.ndarray) and value.dtype.hasobject:
            add(value.tolist())
        elif isinstance(value, str | bytes | int | float | complex) or value is None:
            digest.update(repr(value).encode())
        elif callable(getattr(value, "tobytes", None)):
            digest.update(value.tobytes())
        elif hasattr(value, "__dict__") and id(value) not in seen:
            seen.add(id(value))
            add(vars(value))

    add(samples)
    return digest.hexdigest()


def check_same_stream(name: str, begins_with: str | None, read_again: Callable[[], str | None] | None = None) -> None:
    """Refuse a stream that gives each process its own part, since sharing it out would lose the other parts.

    All processes must call it.

    Args:
        name: The class of the stream.
        begins_with: A digest of the first samples that this process has read; None if it could not read them.
        read_again: Opens the stream once more and returns the new digest. A stream that then begins otherwise is random
            or live by itself, so that a difference does not show parts: it is named in a warning.

    Raises:
        DataError: If the processes read different samples.
    """
    digests = gather_object([begins_with])
    others = [digest not in (None, digests[0]) for digest in digests]
    if not any(others):
        return
    is_other = others[PartialState().process_index]
    again = gather_object([read_again() if is_other and read_again is not None else begins_with])
    if any(other and first == second for other, first, second in zip(others, digests, again, strict=True)):
        raise DataError(_other_samples(name))
    logger.warning_once(
        "%s begins with other samples each time that it is read, so whether each process reads a part of its own "
        "cannot be found out. Rank 0 reads for all. Set dispatch_batches=True if that is right, and "
        "use_distributed_sampler=False if each process reads its own part.",
        name,
    )


def check_same_dataset(dataset: Any) -> None:
    """Refuse a map-style dataset of which each process holds its own part; all processes must call it.

    No sample is read: compared are the lengths, and the indices of a `Subset`. Subsets that differ and overlap, as
    `random_split` draws them without a seed, are named in a warning.

    Raises:
        DataError: If the lengths differ, or no two processes hold a sample in common.
    """
    indices = _indices_of(dataset)
    everyone = gather_object([(_length_of(dataset), None if indices is None else indices[:64].tolist())])
    if all(each == everyone[0] for each in everyone):
        return
    whole = gather_object([indices])
    if any(each is None for each in whole) or len(np.unique(np.concatenate(whole))) == sum(map(len, whole)):
        raise DataError(_other_samples(type(dataset).__name__))
    logger.warning_once(
        "The processes hold different subsets, so that some samples are read twice and others not. Seed what draws "
        "them, as in random_split(..., generator=torch.Generator().manual_seed(0)), or call seed_everything first."
    )


def _indices_of(dataset: Any) -> Any:
    """Return the indices that a subset, or a subset of one, takes of its dataset; None if it is none."""
    indices = None
    while isinstance(dataset, Subset):
        own = np.asarray(dataset.indices)
        indices = own if indices is None else own[indices]
        dataset = dataset.dataset
    return indices


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _other_samples(name: str) -> str:
    return (
        f"{name} gives each process other samples, and would be shared out once more, so that most would be lost. If "
        "each process reads its own part, set use_distributed_sampler=False, of the Trainer or of "
        "DataLoaderConfiguration. Else let all read the same (seed what draws it), or set dispatch_batches=True, so "
        "that rank 0 alone reads."
    )


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
