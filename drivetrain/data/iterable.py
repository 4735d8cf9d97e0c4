"""Reads this process's share of a loader over an iterable dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from drivetrain.data.agreement import check_same_stream, digest_of
from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.order import Position
from drivetrain.data.randomness import (
    EpochStart,
    SeparateDraws,
    find_generators,
    set_generator_state,
    several_processes,
)
from drivetrain.data.reading import Opened, begun, do_nothing, last_rows, rebuilt, up_to, with_rows_found
from drivetrain.data.seeding import ShowUsersDataset, as_is, collate_seed
from drivetrain.data.sharding import Layout, shard_batches, with_last
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import batch_size_or_none
from drivetrain.runtime.seeds import isolated_random_state, sample_seed, seed_all_generators


class Record(NamedTuple):
    """A batch as it leaves the dataset, with what only the reading process can record.

    Attributes:
        batch: The batch.
        rows: Its rows.
        padding: How many of them, its last ones, are padding.
        global_rows: The real rows of all processes.
        begins_with: A digest of the stream's first samples, the same on all processes that read the same stream.
    """

    batch: Any
    rows: int
    padding: int
    global_rows: int
    begins_with: str = ""


class BatchedStream(IterableDataset[Record]):
    """Groups a stream's samples into batches, and collates those of one process.

    Every process reads the whole stream. With workers, each worker groups its own stream.

    Args:
        dataset: The user's dataset.
        collate_fn: The user's collate function.
        layout: How batches are shared.
        batch_size: Samples of a batch; None to collate each sample by itself.
        drop_last: Leave out a last batch that is not full.
        seed: The seed that samples' random states derive from, by their positions in the stream; None to leave them.
        workers: How many workers read; they see the epoch change in shared memory.
        compared: Whether processes compare how the stream begins.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        layout: Layout,
        batch_size: int | None,
        drop_last: bool,
        seed: int | None,
        workers: int,
        compared: bool,
    ) -> None:
        self.dataset = dataset
        self.compared = compared
        self.collate_fn = collate_fn
        self.layout = layout
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64)
        self.dropped = torch.zeros(max(1, workers), dtype=torch.int64)  # batches that each worker leaves out first
        if workers:
            self.epoch.share_memory_()  # type: ignore[no-untyped-call]
            self.dropped.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Record]:
        worker = get_worker_info()
        if self.seed is None:
            return self._records(iter(self.dataset), None)
        seed = sample_seed(self.seed, int(self.epoch), 0 if worker is None else worker.id + 1)
        if worker is not None:
            seed_all_generators(seed)
            return self._records(iter(self.dataset), seed)
        with isolated_random_state():
            seed_all_generators(seed)
            samples = iter(self.dataset)
        return _isolated(self._records(samples, seed))

    def _records(self, samples: Iterator[Any], seed: int | None) -> Iterator[Record]:
        if seed is not None:
            samples = _seeded(samples, seed)
        size = self.batch_size or 1
        held: list[Any] = []  # nothing while this waits to be asked for the next
        worker = get_worker_info()
        dropped = int(self.dropped[0 if worker is None else worker.id])
        chunks: Iterator[Sequence[Any]] = islice(_chunks(samples, size, self.drop_last), dropped, None)
        digest = ""
        if self.compared:
            first = list(islice(chunks, 1))
            digest, chunks = digest_of(first), chain(first, chunks)
            del first
        for chunk, info in shard_batches(chunks, self.layout, streaming=True):
            if seed is not None:
                seed_all_generators(collate_seed(seed, 0, info.consumed or 0))
            held.append(self.collate_fn(chunk if self.batch_size is not None else chunk[0]))
            del chunk
            yield Record(held.pop(), info.rows or 0, info.padding, info.global_rows or 0, digest)


def _seeded(samples: Iterator[Any], seed: int) -> Iterator[Any]:
    """The same samples, each read in the random state of its position."""
    position = 0
    held: list[Any] = []  # nothing while this waits to be asked for the next
    while True:
        seed_all_generators(sample_seed(seed, position, 0))
        held.extend(islice(samples, 1))
        if not held:
            return
        yield held.pop()
        position += 1


def _isolated(records: Iterator[Record]) -> Iterator[Record]:
    """The same records; reading them leaves the global generators where they were."""

    def draw() -> Record | None:
        with isolated_random_state():
            return next(records, None)

    return iter(draw, None)


def _chunks(samples: Iterator[Any], size: int, drop_last: bool) -> Iterator[Sequence[Any]]:
    """Samples in lists of `size`; a stream that has ended is not asked again."""
    held: list[list[Any]] = []  # nothing while this waits to be asked for the next
    while chunk := list(islice(samples, size)):
        is_full = len(chunk) == size
        held.append(chunk)
        del chunk
        if is_full or not drop_last:
            yield held.pop()
        if not is_full:
            return


class StreamReader:
    """Reads an iterable dataset in every process and keeps this process's rows.

    Args:
        loader: The user's loader.
        layout: How its batches are shared. The batch size in it is not used but found.
        seed: The seed that samples' random states derive from; None leaves randomness to torch's loader.
        compared: Whether `begins_with` is found also if one process reads for all.
        keep: How many of an epoch's first batches are kept for those who share these batches.

    Attributes:
        begins_with: A digest of the first samples of the stream, once an iteration has begun.

    Raises:
        ConfigurationError: If the batches cannot be split, or come out of order in several processes.
    """

    def __init__(
        self, loader: DataLoader[Any], layout: Layout, seed: int | None, compared: bool = False, keep: int = 0
    ) -> None:
        self._loader = loader
        self._keep = keep
        self.begins_with: str | None = None
        size = loader.batch_size
        self.finds_rows = size is None
        self.layout = layout._replace(batch_size=1 if size is None else size)
        self.layout.check()
        self._sharded = self.layout.shard.count > 1
        if not loader.in_order and self._sharded:
            raise ConfigurationError(
                "This DataLoader has in_order=False, so the order of its batches differs from run to run and the "
                "processes cannot agree about it. Leave in_order at True where there are several processes.",
                code="DT-101",
            )
        self._seeded = seed is not None
        self._compared = compared or self._sharded
        self._dataset = BatchedStream(
            loader.dataset,
            loader.collate_fn,
            self.layout,
            size,
            loader.drop_last,
            seed,
            loader.num_workers,
            self._compared,
        )
        self._inner = self._make_inner()

    def _make_inner(self) -> DataLoader[Any]:
        return rebuilt(
            self._loader,
            self._dataset,
            batch_size=None,
            collate_fn=as_is,
            worker_init_fn=ShowUsersDataset(self._loader.worker_init_fn),
        )

    ends_alike = False

    @property
    def reads_ahead(self) -> bool:
        """Whether workers read."""
        return self._inner.num_workers > 0

    def restart(self) -> None:
        """Let the next iteration be as the first one: with new workers, where these stay."""
        if self._loader.persistent_workers:
            self._inner = self._make_inner()

    def __len__(self) -> int:
        return self.layout.steps(len(self._loader), last_rows(self._loader))

    def open(self, epoch: int, position: Position, limit: int | None = None) -> Opened:
        """Begin an iteration over an epoch; what comes before the position is read and left out."""
        if self._dataset.layout != self.layout:
            self._dataset.layout = self.layout
            if self._loader.persistent_workers:  # those that are there have a copy
                self._inner = self._make_inner()
        generators = find_generators(self._loader, self._loader.dataset)
        start = position.start or EpochStart.capture(generators)
        together = self._sharded and several_processes()
        if together:
            start = start.agreed()
        close: Callable[[], None] = do_nothing
        self._dataset.epoch.fill_(epoch)
        skipped = self._drop(position)
        records: Iterator[Record]
        if not self._sharded and position.start is None:
            self._inner.generator = self._loader.generator
            records = iter(self._inner)
        else:
            # Every process must draw the same stream: workers from one seed, this process from one state.
            for generator, state in zip(generators, start.own, strict=False):
                set_generator_state(generator, state)
            separate = SeparateDraws(start)
            with separate.drawing():
                records = iter(self._inner)
            if self._sharded and not self._seeded and self._loader.num_workers == 0:
                records = separate.iterate(records)
                close = separate.settle
            elif not self._seeded and self._loader.num_workers == 0:
                # The interrupted run had drawn what comes before, and the one that it had read ahead, from `start`.
                with separate.drawing():
                    records = chain(list(islice(records, skipped + 1)), records)
            separate.settle()
        if self._compared:
            first, records = begun(records)
            self.begins_with = first[0].begins_with if first else digest_of([])
        if together:
            check_same_stream(type(self._loader.dataset).__name__, self.begins_with)
        limit = None if limit is None else limit // self.layout.group_size
        head: list[tuple[Any, int | None]] = []
        pairs = self._pairs(records, position, skipped, limit, head)
        if self.finds_rows:
            pairs = with_rows_found(pairs, alone=not self._sharded)
        return Opened(pairs, start, close, head=head)

    def _drop(self, position: Position) -> int:
        """Let the streams leave out what is no whole step. Returns how many steps are then to be left out."""
        dropped, group = self._dataset.dropped, self.layout.group_size
        dropped.zero_()
        before = position.batches
        if not self._loader.num_workers:
            dropped[0] = before % group
        elif position.group not in (None, group):
            # The batches of a step are all of one worker, so steps of another size were of other batches.
            for number in range(before):
                dropped[number // position.group % len(dropped)] += 1
            return 0
        return before // group

    def _pairs(
        self,
        records: Iterator[Record],
        position: Position,
        skipped: int,
        limit: int | None,
        head: list[tuple[Any, int | None]],
    ) -> Iterator[tuple[Any, BatchInfo]]:
        """The batches, each with its record; one is read ahead, to recognise the last.

        The first ones that are skipped are put into `head`.
        """
        consumed = int(self._dataset.dropped.sum()) * (self.layout.batch_size or 1)
        for record in islice(records, skipped):
            consumed += record.global_rows
            if len(head) < self._keep:
                head.append((record.batch, batch_size_or_none(record.batch) if self.finds_rows else record.rows))
        index = position.batches // self.layout.group_size
        held: list[Any] = []  # nothing while this waits to be asked for the next
        for (batch, rows, padding, global_rows, _), last in with_last(up_to(records, limit, index)):
            held.append(batch)
            del batch
            consumed += global_rows
            yield held.pop(), BatchInfo(index, rows, padding, global_rows, last, consumed)
            index += 1
