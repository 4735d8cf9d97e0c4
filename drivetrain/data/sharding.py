"""Assignment of batches and rows to processes, padding, and agreement between processes about batches.

Batches are taken in groups, with one batch per process (or, with `split_batches`, one batch for all). Only the last
group of an epoch can be short, and the `TailPolicy` decides how it is shared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Subset

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.configuration import DataShard, TailPolicy
from drivetrain.runtime.collectives import gather_object, reduce
from drivetrain.runtime.errors import ConfigurationError, DataError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import batch_size_or_none, field_names, honor_type, with_fields
from drivetrain.runtime.state import PartialState

Item = TypeVar("Item")

_END: Any = object()


class Share(NamedTuple):
    """Slice of a batch that one process gets in a step, and the padding rows that are appended to the slice.

    Attributes:
        source: Index of the batch in the group, or None if the share is padding only.
        start: First row taken from the batch.
        stop: Row after the last one taken.
        padding: Number of padding rows that follow.
        offset: Position in the epoch's first samples at which the padding begins. It wraps around at their end.
    """

    source: int | None
    start: int
    stop: int
    padding: int = 0
    offset: int = 0


class Layout(NamedTuple):
    """Rules for dividing batches among processes, such as the policy for incomplete batches at the epoch's end.

    Attributes:
        shard: Part of the data that this process reads.
        tail: Policy for the end of an epoch.
        split: True if each batch is split over the processes.
        batch_size: Rows in a full batch of the user's loader, or None if unknown.
        drop_last: True if a last group with fewer batches than processes is dropped.
    """

    shard: DataShard
    tail: TailPolicy
    split: bool = False
    batch_size: int | None = None
    drop_last: bool = False

    @property
    def group_size(self) -> int:
        return 1 if self.split else self.shard.count

    def check(self) -> None:
        if self.split and self.batch_size is not None and self.batch_size % self.shard.count:
            raise ConfigurationError(
                f"split_batches=True splits each batch over {self.shard.count} processes, but the loader's batch size "
                f"{self.batch_size} is not a multiple of {self.shard.count}. Use a multiple, or omit "
                "split_batches, so that each process gets whole batches.",
            )

    def steps(self, batches: int, last_rows: int | None = None) -> int:
        if self.split and self.tail is TailPolicy.UNEVEN and last_rows is not None:
            return batches - (self.shard.index >= last_rows)
        if self.split or self.shard.count == 1:
            return batches
        if self.drop_last:
            return batches // self.shard.count
        if self.tail is TailPolicy.UNEVEN:
            # This process takes the batches index, index + count, and so on.
            return max(0, (batches - self.shard.index + self.shard.count - 1) // self.shard.count)
        return -(-batches // self.shard.count)


class Head(NamedTuple):
    """First samples of an epoch, which are repeated as padding if the epoch's last batches are incomplete.

    Attributes:
        samples: The samples.
        sizes: Number of samples in each of the epoch's first batches.
    """

    samples: list[Any]
    sizes: list[int]


def plan_share(
    sizes: Sequence[int], layout: Layout, *, first_batch: int, final: bool, index: int | None = None
) -> Share | None:
    if not all(sizes):
        raise DataError(
            "The batch sampler returned an empty batch, which cannot be split among processes. Every batch must have "
            "at least one index."
        )
    mine = layout.shard.index if index is None else index
    if layout.split:
        return _plan_slice(sizes[0], layout, mine, first_batch, final)
    count, full = layout.shard.count, layout.batch_size
    size = sizes[mine] if mine < len(sizes) else 0
    padding = offset = 0
    if layout.tail is TailPolicy.COMPLETE:
        # Only the last group is padded, to one size for all processes.
        if len(sizes) < count or (final and full is not None and any(each < full for each in sizes)):
            target = max(full or 0, *sizes)
            missing = [target - each for each in sizes] + [target] * (count - len(sizes))
            padding, offset = missing[mine], sum(missing[:mine])
    elif not size:
        if layout.tail is TailPolicy.UNEVEN:
            return None
        # TailPolicy.WHOLE: a copy of the epoch's first batch, all of it padding.
        padding = first_batch
    return Share(mine if size else None, 0, size, padding, offset)


def _plan_slice(size: int, layout: Layout, mine: int, first_batch: int, final: bool) -> Share | None:
    count = layout.shard.count
    if layout.tail is TailPolicy.COMPLETE:
        target = max(layout.batch_size or 0, size) if final else size
        # Rows of each process, rounded up. Missing rows become padding.
        width = -(-target // count)
        start, stop = min(mine * width, size), min((mine + 1) * width, size)
        padding = width - (stop - start)
        return Share(0 if stop > start else None, start, stop, padding, max(0, mine * width - size))
    # The first `extra` processes get one row more than the others.
    each, extra = divmod(size, count)
    start = mine * each + min(mine, extra)
    stop = start + each + (mine < extra)
    if stop > start:
        return Share(0, start, stop)
    return None if layout.tail is TailPolicy.UNEVEN else Share(None, 0, 0, -(-first_batch // count))


def with_last(items: Iterable[Item], length: int | None = None) -> Iterator[tuple[Item, bool]]:
    iterator = iter(items)
    number = 1
    ahead = [next(iterator, _END)]  # never holds the latest yielded item, so that a batch is freed with its step
    while ahead[0] is not _END:
        # If the length is known, only the last item is checked by reading ahead.
        if length is not None and number < length:
            yield ahead.pop(), False
            ahead.append(next(iterator, _END))
        else:
            ahead.append(next(iterator, _END))
            yield ahead.pop(0), ahead[0] is _END
        number += 1


def shard_batches(
    batches: Iterable[Sequence[Item]],
    layout: Layout,
    *,
    index: int = 0,
    consumed: int = 0,
    head: Head | None = None,
    length: int | None = None,
    streaming: bool = False,
) -> Iterator[tuple[Sequence[Item], BatchInfo]]:
    if layout.shard.count == 1:
        held: list[Sequence[Item]] = []  # empty while suspended, so that a batch is freed with its step
        for batch, last in map(_not_last, batches) if streaming else with_last(batches, length):
            try:
                rows = len(batch)
            except TypeError:  # torch accepts any iterable of indices
                batch = list(batch)
                rows = len(batch)
            held.append(batch)
            del batch
            consumed += rows
            yield held.pop(), BatchInfo(index, rows, 0, rows, last, consumed)
            index += 1
        return
    shares = _shares(batches, layout, index, consumed, head, streaming)
    if layout.tail is not TailPolicy.UNEVEN or streaming:
        yield from shares
        return
    for (samples, info), last in with_last(shares):
        info.last = last
        yield samples, info


def _not_last(batch: Sequence[Item]) -> tuple[Sequence[Item], bool]:
    return batch, False


def _shares(
    batches: Iterable[Sequence[Item]], layout: Layout, index: int, consumed: int, head: Head | None, streaming: bool
) -> Iterator[tuple[Sequence[Item], BatchInfo]]:
    # With `TailPolicy.UNEVEN`, the `last` of a `BatchInfo` refers to the group of all processes.
    groups = _groups(batches, layout)
    full = layout.batch_size or 0
    for group, final in ((group, False) for group in groups) if streaming else with_last(groups):
        sizes = [len(batch) for batch in group]
        if head is None:
            head = Head([sample for batch in group for sample in batch], sizes)
        ending = final or (streaming and (len(group) < layout.group_size or sizes[-1] < full))
        share = plan_share(sizes, layout, first_batch=head.sizes[0], final=ending)
        total = sum(sizes)
        consumed += total
        if share is None:
            continue
        samples: Sequence[Item] = []
        if share.source is not None:
            samples = group[share.source]
            if share.padding or share.stop - share.start < len(samples):
                samples = list(samples[share.start : share.stop])
        if share.padding:
            samples = [*samples, *padding_samples(head.samples, share)]
        offset = sum(sizes[: share.source]) + share.start if share.source is not None else total
        yield samples, BatchInfo(index, len(samples), share.padding, total, final, consumed, None, offset)
        index += 1


def padding_samples(samples: Sequence[Item], share: Share) -> list[Item]:
    return [samples[(share.offset + number) % len(samples)] for number in range(share.padding)]


def _groups(batches: Iterable[Sequence[Item]], layout: Layout) -> Iterator[list[Sequence[Item]]]:
    return group_into_steps((batch if hasattr(batch, "__getitem__") else list(batch) for batch in batches), layout)


def group_into_steps(items: Iterator[Item], layout: Layout) -> Iterator[list[Item]]:
    size = layout.group_size
    while group := list(islice(items, size)):
        if layout.drop_last and len(group) < size:
            return
        yield group


# Rows of collated batches


def share_of_batches(
    group: Sequence[Any], sizes: Sequence[int], share: Share, head: Sequence[Any], head_sizes: Sequence[int]
) -> Any:
    # A batch of padding only is the first batch of the epoch.
    if share.source is None and share.offset == 0 and share.padding == head_sizes[0]:
        return head[0]
    own: list[Any] = [] if share.source is None else [group[share.source]]
    counts = [] if share.source is None else [sizes[share.source]]
    taken = list(range(share.start, share.stop))
    if not share.padding:
        return own[0] if len(taken) == counts[0] else pick_rows(own, counts, taken)
    # Padding rows come from the epoch's first batches.
    total, everything, sizes_of_all = sum(head_sizes), [*head, *own], [*head_sizes, *counts]
    real = [total + row for row in taken]
    paddings = [[(share.offset + number) % total for number in range(share.padding)]]
    if own:  # fall back to padding with the batch's own rows; the head still shows which values are columns
        paddings.append([total + number % counts[0] for number in range(share.padding)])
    for padding in paddings:
        with suppress(BatchMismatch):
            return pick_rows(everything, sizes_of_all, real + padding)
    batch, rows = (own[0], counts[0]) if own else (head[0], head_sizes[0])
    return pick_rows([batch], [rows], taken + [number % rows for number in range(share.padding)])


class BatchMismatch(Exception):
    """Raised if batches cannot be joined into a larger one, for example because their keys differ."""


def pick_rows(batches: Sequence[Any], counts: Sequence[int], picks: Sequence[int]) -> Any:
    # `picks` numbers the rows of all batches in order. Tensors, arrays and lists are columns if they are as long as
    # their batch has rows. All other values are taken unchanged from the last batch.
    like = batches[-1]
    if any(type(batch) is not type(like) for batch in batches):
        raise BatchMismatch
    if isinstance(like, Tensor | np.ndarray):
        return _rows_of_arrays(batches, counts, picks)
    if isinstance(like, (list, tuple)):
        if _is_column(batches, counts):
            every = [value for batch in batches for value in batch]
            return honor_type(like, [every[pick] for pick in picks])
        if any(len(batch) != len(like) for batch in batches):
            raise BatchMismatch
        return honor_type(like, [pick_rows(parts, counts, picks) for parts in zip(*batches, strict=True)])
    if isinstance(like, Mapping):
        if any(batch.keys() != like.keys() for batch in batches):
            raise BatchMismatch
        values = {key: pick_rows([batch[key] for batch in batches], counts, picks) for key in like}
        return values if type(like) is dict else type(like)(values)  # type: ignore[call-arg]
    names = field_names(like)
    if names is not None:
        columns = ([getattr(batch, name) for batch in batches] for name in names)
        return with_fields(like, [pick_rows(column, counts, picks) for column in columns])
    return like


def _rows_of_arrays(arrays: Sequence[Any], counts: Sequence[int], picks: Sequence[int]) -> Any:
    like = arrays[-1]
    if not like.ndim or like.shape[0] != counts[-1]:
        return like
    if len(set(counts)) > 1 and all(array.shape == like.shape for array in arrays):
        return like  # equal shapes in batches of different sizes: not a column
    before = sum(counts[:-1])
    if picks and min(picks) >= before:  # only rows of the last batch: the others may have another form
        arrays, counts, picks = [like], [counts[-1]], [pick - before for pick in picks]
    for array, rows in zip(arrays, counts, strict=True):
        if not array.ndim or array.shape[0] != rows or array.shape[1:] != like.shape[1:]:
            raise BatchMismatch
    if isinstance(like, Tensor):
        return torch.cat(list(arrays))[torch.tensor(picks, dtype=torch.int64, device=like.device)]
    return np.concatenate(arrays)[list(picks)]


def _is_column(sequences: Sequence[Sequence[Any]], counts: Sequence[int]) -> bool:
    # True if lists hold one value per row, as labels do. Otherwise their items are the fields of a batch.
    if any(len(values) != rows for values, rows in zip(sequences, counts, strict=True)):
        return False
    if len(set(counts)) > 1:  # the number of parts would not change with the number of rows
        return True
    values, rows = sequences[-1], counts[-1]
    if all(isinstance(each, Tensor) for each in values):
        # Three tensors of shape [3, height, width] are three images, not three columns.
        images = rows == 3 and all(each.dim() == 3 for each in values)
        return images or all(not each.dim() or each.size(0) != rows for each in values)
    if all(isinstance(each, Mapping) for each in values):
        return True  # for example the targets of images
    return not any(_has_rows(each, rows) for each in values)


def _has_rows(part: Any, rows: int) -> bool:
    sequence = isinstance(part, (list, tuple)) and len(part) == rows
    return sequence or isinstance(part, Tensor) or batch_size_or_none(part) == rows


# Batches of equal shape, for devices that compile a graph per shape


def pad_short_batches(pairs: Iterable[tuple[Any, BatchInfo]], size: int | None) -> Iterator[tuple[Any, BatchInfo]]:
    """Yield batches, and fill short ones with repeated rows, so that a device compiles for one size only."""
    full = size or 0

    def fill(pair: tuple[Any, BatchInfo]) -> tuple[Any, BatchInfo]:
        nonlocal full
        batch, info = pair
        rows = batch_size_or_none(batch) if info.rows is None else info.rows
        if rows:
            # Without a known batch size, the largest batch so far is a full one.
            full = max(full, rows)
            if rows < full:
                picks = [number % rows for number in range(full)]
                batch = pick_rows([batch], [rows], picks)
                info.padding += full - rows
                info.rows = full
        return batch, info

    return map(fill, pairs)


# Agreement between processes


logger = get_logger(__name__)

Pair = tuple[Any, BatchInfo]

_NONE_LEFT: Any = (None, None)


def sum_over_processes(numbers: Sequence[int]) -> list[int]:
    # On the CPU if the process group allows it, because reading the result would wait for a device.
    on_host = not dist.is_initialized() or "cpu" in str(dist.get_backend_config())
    device = torch.device("cpu") if on_host else PartialState().device
    total: list[int] = reduce(torch.tensor(numbers, dtype=torch.int64, device=device), "sum").tolist()
    return total


def check_common_end(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """Yield this process's batches, and raise an error if the number of batches differs between processes.

    Knowing the last batch in advance is required because an accumulation window ends early with it, and gradients are
    reduced then.
    """
    given, world = 0, PartialState().num_processes
    held: list[Pair] = []  # empty while suspended, so that a batch is freed with its step
    for batch, info in chain(pairs, repeat(_NONE_LEFT)):
        has_one = info is not None
        has_more = has_one and not info.last
        given += has_one
        # All processes agree if each count is 0 or the number of processes.
        if any(0 < count < world for count in sum_over_processes([has_one, has_more])):
            raise DataError(_different_ends_message(gather_object([(given, has_more)])))
        if has_one:
            held.append((batch, info))
            del batch
            yield held.pop()
        if not has_more:
            return


def digest_of(samples: Any) -> str:
    """Return a hash of the content of samples, so that processes can check whether they read equal samples.

    For objects of unknown classes, it covers the bytes (`tobytes`, as for images) or the attributes.
    """
    digest, seen = hashlib.blake2b(digest_size=16), set[int]()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(repr((value.shape, value.dtype)).encode())
            # Sparse and quantised tensors cannot be viewed as bytes.
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
            # Objects can contain themselves.
            seen.add(id(value))
            add(vars(value))

    add(samples)
    return digest.hexdigest()


def check_same_stream(name: str, begins_with: str | None, read_again: Callable[[], str | None] | None = None) -> None:
    """Raise an error if an iterable dataset yields different samples on each process.

    An iterable dataset that shards itself would lose data if it were sharded again. All processes must call the
    function.
    """
    digests = gather_object([begins_with])
    others = [digest not in (None, digests[0]) for digest in digests]
    if not any(others):
        return
    is_other = others[PartialState().process_index]
    # Samples that differ at each reading come from a random order, and not from a split dataset.
    again = gather_object([read_again() if is_other and read_again is not None else begins_with])
    if any(other and first == second for other, first, second in zip(others, digests, again, strict=True)):
        raise DataError(_other_samples_message(name))
    logger.warning_once(
        "%s begins with different samples each time it is read, so it is unknown whether each process reads its own "
        "part. Rank 0 reads for all processes. Set dispatch_batches=True to confirm this, or "
        "use_distributed_sampler=False if each process reads its own part.",
        name,
    )


def check_same_dataset(dataset: Any) -> None:
    """Raise an error if each process passes a different part of a dataset, which drivetrain would divide again.

    All processes must call the function.

    No sample is read: only the lengths and the indices of a `Subset` are compared. Overlapping subsets, as
    `random_split` draws them without a seed, cause a warning.
    """
    indices = _indices_of(dataset)
    everyone = gather_object([(_length_of(dataset), None if indices is None else indices[:64].tolist())])
    if all(each == everyone[0] for each in everyone):
        return
    whole = gather_object([indices])
    # Subsets without a common index are parts of one dataset.
    if any(each is None for each in whole) or len(np.unique(np.concatenate(whole))) == sum(map(len, whole)):
        raise DataError(_other_samples_message(type(dataset).__name__))
    logger.warning_once(
        "The processes have different subsets, so some samples are read twice and others are never read. Seed the "
        "split, as in random_split(..., generator=torch.Generator().manual_seed(0)), or call seed_everything first."
    )


def _indices_of(dataset: Any) -> Any:
    """Return the indices of a (nested) `Subset` in the full dataset, or None."""
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


def _other_samples_message(name: str) -> str:
    return (
        f"{name} gives each process other samples, and sharding them again would lose most of them. If "
        "each process reads its own part, set use_distributed_sampler=False, of the Trainer or of "
        "DataLoaderConfiguration. Otherwise seed the dataset so that all processes read equal samples, or set "
        "dispatch_batches=True, so that only rank 0 reads."
    )


def _different_ends_message(ends: list[tuple[int, bool]]) -> str:
    counts = ", ".join(
        f"rank {rank} has more than {given}" if has_more else f"rank {rank} has {given}"
        for rank, (given, has_more) in enumerate(ends)
    )
    return (
        f"The processes have different numbers of batches in this epoch: {counts}. They step together, so all need "
        "equally many. Make every process's dataset end after equally many batches, or stop all at the "
        "smallest number, for example with limit_train_batches."
    )


def with_rows_of_all(pairs: Iterator[Pair], shards: int) -> Iterator[Pair]:
    # Processes that work on one batch together all count its rows.
    copies = PartialState().num_processes // shards

    def exchange(pair: Pair) -> Pair:
        _, info = pair
        is_real = int(not info.is_padding)
        rows = info.real_rows
        unknown, real, total = sum_over_processes([int(rows is None), is_real, rows or 0])
        # If the rows of any batch of the step are unknown, all its real batches have equal weights.
        if unknown:
            info.weights = is_real, real // copies
        else:
            info.global_rows = total // copies
        return pair

    return map(exchange, pairs)
