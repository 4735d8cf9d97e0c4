"""Which rows of which batch each process takes: pure functions, without processes or random state.

Batches are taken in groups, one for each process (or, with `split_batches`, one for all of them). Only the last
group of an epoch can be short; what happens there is the `TailPolicy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.configuration import DataShard, TailPolicy
from drivetrain.runtime.errors import ConfigurationError, DataError

Item = TypeVar("Item")

_END: Any = object()
_UNREAD: Any = object()


class Share(NamedTuple):
    """What one process takes of a group of batches: some rows of one of them, and then padding.

    Attributes:
        source: Which batch of the group; None if there is only padding.
        start: The first row taken of that batch.
        stop: The row after the last one taken.
        padding: How many rows of padding follow.
        offset: Where in the epoch's first samples the padding begins. It continues from the start after their end.
    """

    source: int | None
    start: int
    stop: int
    padding: int = 0
    offset: int = 0


class Layout(NamedTuple):
    """How groups of batches are shared.

    Attributes:
        shard: This process's part.
        tail: What happens at the end of the epoch.
        split: Whether each batch is split over the processes.
        batch_size: Rows of a full batch of the user's loader; None if unknown.
        drop_last: Whether the last batches are left out if there is not one for each process.
    """

    shard: DataShard
    tail: TailPolicy
    split: bool = False
    batch_size: int | None = None
    drop_last: bool = False

    @property
    def group_size(self) -> int:
        """Batches that all processes together take in one step."""
        return 1 if self.split else self.shard.count

    def check(self) -> None:
        """Refuse a batch size that cannot be split.

        Raises:
            ConfigurationError: If the batches are to be split and their size is no multiple of the processes.
        """
        if self.split and self.batch_size is not None and self.batch_size % self.shard.count:
            raise ConfigurationError(
                f"split_batches=True splits each batch over {self.shard.count} processes, but the loader's batch size "
                f"{self.batch_size} does not divide by {self.shard.count}. Give a batch size that does, or leave "
                "split_batches out: then each process gets whole batches.",
                code="DT-042",
            )

    def steps(self, batches: int, last_rows: int | None = None) -> int:
        """Return how many batches this process gets in an epoch.

        Args:
            batches: The batches of the user's loader.
            last_rows: Rows of the last one; None if unknown.
        """
        if self.split and self.tail is TailPolicy.UNEVEN and last_rows is not None:
            return batches - (self.shard.index >= last_rows)
        if self.split or self.shard.count == 1:
            return batches
        if self.drop_last:
            return batches // self.shard.count
        if self.tail is TailPolicy.UNEVEN:
            return max(0, (batches - self.shard.index + self.shard.count - 1) // self.shard.count)
        return -(-batches // self.shard.count)


class Head(NamedTuple):
    """The first samples of the epoch's order, which padding is made of.

    Attributes:
        samples: The samples.
        sizes: How many of them are in each of the epoch's first batches.
    """

    samples: list[Any]
    sizes: list[int]


def plan_share(
    sizes: Sequence[int], layout: Layout, *, first_batch: int, final: bool, index: int | None = None
) -> Share | None:
    """Decide what one process takes of a group of batches.

    Args:
        sizes: Rows of each batch in the group; at least one batch.
        layout: How groups are shared.
        first_batch: Rows of the epoch's first batch.
        final: Whether no group follows.
        index: Which part to plan for; by default that of the layout.

    Returns:
        The share; None if this process gets nothing.

    Raises:
        DataError: If a batch is empty.
    """
    if not all(sizes):
        raise DataError(
            "The batch sampler gave an empty batch, which cannot be shared between processes. Let it give batches of "
            "at least one index."
        )
    mine = layout.shard.index if index is None else index
    if layout.split:
        return _plan_slice(sizes[0], layout, mine, first_batch, final)
    count, full = layout.shard.count, layout.batch_size
    size = sizes[mine] if mine < len(sizes) else 0
    padding = offset = 0
    if layout.tail is TailPolicy.COMPLETE:
        if len(sizes) < count or (final and full is not None and any(each < full for each in sizes)):
            target = max(full or 0, *sizes)
            missing = [target - each for each in sizes] + [target] * (count - len(sizes))
            padding, offset = missing[mine], sum(missing[:mine])
    elif not size:
        if layout.tail is TailPolicy.UNEVEN:
            return None
        padding = first_batch
    return Share(mine if size else None, 0, size, padding, offset)


def _plan_slice(size: int, layout: Layout, mine: int, first_batch: int, final: bool) -> Share | None:
    """What process `mine` takes of one batch that is split over all."""
    count = layout.shard.count
    if layout.tail is TailPolicy.COMPLETE:
        target = max(layout.batch_size or 0, size) if final else size
        width = -(-target // count)
        start, stop = min(mine * width, size), min((mine + 1) * width, size)
        padding = width - (stop - start)
        return Share(0 if stop > start else None, start, stop, padding, max(0, mine * width - size))
    each, extra = divmod(size, count)
    start = mine * each + min(mine, extra)
    stop = start + each + (mine < extra)
    if stop > start:
        return Share(0, start, stop)
    return None if layout.tail is TailPolicy.UNEVEN else Share(None, 0, 0, -(-first_batch // count))


def with_last(items: Iterable[Item], length: int | None = None) -> Iterator[tuple[Item, bool]]:
    """Pair each item with whether it is the last one.

    Args:
        items: Any iterable.
        length: How many items are expected. While more are to follow, none is read ahead; without
            it, one is always read ahead.
    """
    iterator = iter(items)
    number = 1
    ahead = [next(iterator, _END)]  # never what was given last: a batch is freed with its step
    while ahead[0] is not _END:
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
    """Take one process's share out of an epoch's batches.

    A world of one gets the very batches that it was given.

    Args:
        batches: The epoch's batches, each a sequence of samples or of their indices.
        layout: How they are shared.
        index: The number of the first batch that comes out, where the epoch does not begin at its start.
        consumed: Samples of the epoch that were consumed before.
        head: The epoch's first samples, where `batches` does not begin with them.
        length: How many batches are expected (see `with_last`); used in a world of one.
        streaming: Read nothing ahead: `BatchInfo.last` then stays False.

    Yields:
        The samples of this process's next batch, and what is known about it.
    """
    if layout.shard.count == 1:
        held: list[Sequence[Item]] = []  # nothing while this waits to be asked for the next
        for batch, last in map(_not_last, batches) if streaming else with_last(batches, length):
            try:
                rows = len(batch)
            except TypeError:  # torch takes any iterable of indices
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
    """The shares of one process among several; for TailPolicy.UNEVEN `last` is that of the group, not the process."""
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
    """The padding of a share, out of the epoch's first samples."""
    return [samples[(share.offset + number) % len(samples)] for number in range(share.padding)]


def _groups(batches: Iterable[Sequence[Item]], layout: Layout) -> Iterator[list[Sequence[Item]]]:
    """Take batches in groups; the last one may be short."""
    return grouped((batch if hasattr(batch, "__getitem__") else list(batch) for batch in batches), layout)


def grouped(items: Iterator[Item], layout: Layout) -> Iterator[list[Item]]:
    """Take items in groups, one for each process; a last group that is short is left out if the layout drops it.

    Args:
        items: Batches, or what describes them.
        layout: How they are shared.
    """
    size = layout.group_size
    while group := list(islice(items, size)):
        if layout.drop_last and len(group) < size:
            return
        yield group
