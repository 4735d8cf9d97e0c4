"""Reads this process's share of any iterable of ready batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.configuration import TailPolicy
from drivetrain.data.order import Position
from drivetrain.data.randomness import EpochStart, find_generators
from drivetrain.data.reading import Opened, do_nothing, last_rows, least, up_to
from drivetrain.data.rows import share_of_batches
from drivetrain.data.sharding import Layout, Share, grouped, plan_share, with_last
from drivetrain.runtime.errors import DataError
from drivetrain.runtime.nested import batch_size_or_none

Pair = tuple[Any, BatchInfo]


class ReadyBatchesReader:
    """Shares ready batches: a list of them, or a loader that is not torch's own.

    Every process iterates all of them and keeps its own.

    Args:
        batches: Anything that gives batches again at each iteration.
        layout: How they are shared.
        counted: Whether rows are counted also where there is one process, since its batches are shared later.
    """

    finds_rows = reads_ahead = False

    @property
    def ends_alike(self) -> bool:
        """Whether the batches are counted beforehand."""
        return hasattr(self._batches, "__len__")

    def __init__(self, batches: Iterable[Any], layout: Layout, counted: bool = False) -> None:
        self._batches = batches
        self._counted = counted
        self.layout = layout
        layout.check()

    def __len__(self) -> int:
        return self.layout.steps(len(self._batches), last_rows(self._batches))  # type: ignore[arg-type]

    def open(self, epoch: int, position: Position, limit: int | None = None) -> Opened:
        """Begin an iteration; what comes before the position is read and left out."""
        start = EpochStart.capture(find_generators(self._batches))
        try:
            length: int | None = len(self._batches)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = None
        length = least(length, limit)
        batches = up_to(iter(self._batches), limit)
        if self.layout.shard.count == 1 and not self._counted:
            return Opened(_uncounted(batches, position.batches, length), start, do_nothing)
        pairs = self._pairs(batches, position.batches, length)
        if self.layout.shard.count == 1:
            return Opened(pairs, start, do_nothing)
        return Opened(own_pairs(share_pairs(pairs, self.layout), self.layout.shard.index), start, do_nothing)

    def restart(self) -> None:
        """Nothing: the batches' own iterator is all that there is."""

    def _pairs(self, batches: Iterator[Any], skipped: int, length: int | None) -> Iterator[Pair]:
        """All batches, each with what is known about it."""
        consumed: int | None = 0

        def describe(given: tuple[Any, bool], number: int) -> Pair:
            nonlocal consumed
            batch, last = given
            rows = batch_size_or_none(batch)
            consumed = None if rows is None or consumed is None else consumed + rows
            return batch, BatchInfo(number, rows, 0, rows, last, consumed)

        return islice(map(describe, with_last(batches, length), count()), skipped, None)


def _uncounted(batches: Iterator[Any], skipped: int, length: int | None) -> Iterator[Pair]:
    """All batches, for one process alone: nothing is padded, so their rows need not be counted."""

    def describe(given: tuple[Any, bool], number: int) -> Pair:
        batch, last = given
        return batch, BatchInfo(number, None, 0, None, last, None)

    return islice(map(describe, with_last(batches, length), count()), skipped, None)


def own_pairs(steps: Iterator[list[Pair | None]], index: int) -> Iterator[Pair]:
    """One process's batches of each step."""
    return (pair for step in steps if (pair := step[index]) is not None)


def share_pairs(pairs: Iterator[Pair], layout: Layout) -> Iterator[list[Pair | None]]:
    """Share ready batches between processes.

    Args:
        pairs: The batches of a world of one, each with what is known about it.
        layout: How they are shared.

    Yields:
        For each step, every process's batch, or None for one that gets nothing.

    Raises:
        DataError: If batches are to be split whose rows cannot be found.
    """
    steps = _steps(pairs, layout)
    if layout.tail is not TailPolicy.UNEVEN:
        yield from steps
        return
    for step, following in _with_following(steps):
        for own, next_own in zip(step, following or [None] * len(step), strict=True):
            if own is not None:
                own[1].last = next_own is None
        yield step


def _with_following(
    steps: Iterator[list[Pair | None]],
) -> Iterator[tuple[list[Pair | None], list[Pair | None] | None]]:
    """Each step with the one that follows."""
    step = next(steps, None)
    while step is not None:
        following = next(steps, None)
        yield step, following
        step = following


def _steps(pairs: Iterator[Pair], layout: Layout) -> Iterator[list[Pair | None]]:
    """The batches of all processes, step by step."""
    group_size = layout.group_size
    head: list[Any] = []
    head_sizes: list[int] = []
    index = None
    groups = grouped(pairs, layout)
    for group, final in with_last(groups) if layout.drop_last else ((each, False) for each in groups):
        batches = [batch for batch, _ in group]
        infos = [info for _, info in group]
        if index is None:
            index = infos[0].index // group_size
        if not head:
            head, head_sizes = batches, [info.rows or 1 for info in infos]
            if layout.batch_size is None:
                layout = layout._replace(batch_size=infos[0].rows)
        sizes = [info.rows for info in infos]
        known = all(size is not None for size in sizes)
        if not known and layout.split:
            raise DataError(
                f"split_batches=True splits each batch over {layout.shard.count} processes, but a batch of type "
                f"{type(batches[0]).__name__!r} has no rows that could be found. Give batches that hold tensors, or "
                "leave split_batches out."
            )
        plan = (
            layout
            if known
            else layout._replace(tail=TailPolicy.WHOLE if layout.tail is TailPolicy.COMPLETE else layout.tail)
        )
        counts = [size or 1 for size in sizes]
        last, consumed = final or infos[-1].last, infos[-1].consumed
        total = sum(counts) if known else None
        step: list[Pair | None] = []
        for member in range(layout.shard.count):
            share = plan_share(counts, plan, first_batch=head_sizes[0], final=last, index=member)
            if share is None:
                step.append(None)
                continue
            batch = share_of_batches(batches, counts, share, head, head_sizes)
            rows = share.stop - share.start + share.padding
            info = BatchInfo(index, _rows(rows, share, known), share.padding, total, last, consumed)
            if not known:
                info.weights = whole_batches(share.padding, len(group))
            step.append((batch, info))
        yield step
        index += 1


def whole_batches(padding: int, real: int) -> tuple[int, int]:
    """What counts in place of rows that cannot be found: each real batch of the step as much as any other."""
    return int(not padding), real


def _rows(rows: int, share: Share, known: bool) -> int | None:
    """The rows of a share; those of padding are always known."""
    return rows if known or share.padding else None
