"""Readers of this process's share of an iterable dataset or of any iterable of batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, get_worker_info

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.configuration import TailPolicy
from drivetrain.data.order import Position
from drivetrain.data.reader import Opened, begun, count_rows, do_nothing, last_rows, rebuilt, smallest_known, up_to
from drivetrain.data.seeding import ShowUsersDataset, as_is, collate_seed
from drivetrain.data.sharding import (
    Layout,
    check_same_stream,
    digest_of,
    group_into_steps,
    plan_share,
    shard_batches,
    share_of_batches,
    with_last,
)
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DataError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import batch_size_or_none
from drivetrain.runtime.seeds import (
    EpochStart,
    SeparateDraws,
    find_generators,
    generator_state,
    isolated_random_state,
    kept_generators,
    sample_seed,
    seed_all_generators,
    set_generator_state,
    several_processes,
)


class Record(NamedTuple):
    batch: Any
    rows: int  # including padding
    padding: int  # its last rows
    global_rows: int  # real rows of all processes
    begins_with: str = ""  # digest of the stream's first samples, equal on all processes that read the same stream


class BatchedStream(IterableDataset[Record]):
    """Dataset that groups an iterable dataset's samples into collated batches.

    Every process reads the whole stream. Each worker groups the samples of its own stream.
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
        self.dropped = torch.zeros(max(1, workers), dtype=torch.int64)  # number of first batches that each worker skips
        # Persistent workers hold copies of this dataset, which only shared memory can reach.
        if workers:
            self.epoch.share_memory_()  # type: ignore[no-untyped-call]
            self.dropped.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Record]:
        worker = get_worker_info()
        if self.seed is None:
            return self._records(iter(self.dataset), None)
        # The main process counts as 0, and workers count from 1.
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
            samples = _seed_each_sample(samples, seed)
        size = self.batch_size or 1
        held: list[Any] = []  # empty while suspended, so that a batch is freed with its step
        worker = get_worker_info()
        dropped = int(self.dropped[0 if worker is None else worker.id])
        chunks: Iterator[Sequence[Any]] = islice(_chunks(samples, size, self.drop_last), dropped, None)
        digest = ""
        # Processes compare hashes of the first batch, to detect streams that differ.
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


def _seed_each_sample(samples: Iterator[Any], seed: int) -> Iterator[Any]:
    position = 0
    held: list[Any] = []  # empty while suspended, so that a batch is freed with its step
    while True:
        # Seeded by position, so that a sample's random numbers do not depend on earlier draws.
        seed_all_generators(sample_seed(seed, position, 0))
        held.extend(islice(samples, 1))
        if not held:
            return
        yield held.pop()
        position += 1


def _isolated(records: Iterator[Record]) -> Iterator[Record]:

    def draw() -> Record | None:
        with isolated_random_state():
            return next(records, None)

    return iter(draw, None)


def _chunks(samples: Iterator[Any], size: int, drop_last: bool) -> Iterator[Sequence[Any]]:
    """Yield lists of `size` samples, and a shorter last list unless `drop_last` is True."""
    held: list[list[Any]] = []  # empty while suspended, so that a batch is freed with its step
    while chunk := list(islice(samples, size)):
        is_full = len(chunk) == size
        held.append(chunk)
        del chunk
        if is_full or not drop_last:
            yield held.pop()
        # The stream has ended and must not be read again.
        if not is_full:
            return


class StreamReader:
    """Reader for an `IterableDataset`, which gives this process its own part of the dataset's samples."""

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
                "This DataLoader has in_order=False, so the order of its batches differs from run to run and between "
                "processes. Leave in_order at True if there are several processes.",
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
        return self._inner.num_workers > 0

    def restart(self) -> None:
        if self._loader.persistent_workers:
            self._inner = self._make_inner()

    def __len__(self) -> int:
        return self.layout.steps(len(self._loader), last_rows(self._loader))

    def open(self, epoch: int, position: Position, limit: int | None = None) -> Opened:
        if self._dataset.layout != self.layout:
            self._dataset.layout = self.layout
            if self._loader.persistent_workers:  # running workers hold a copy of the old layout
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
            # Every process must read the same stream: seed the workers equally, and draw from one random state.
            for generator, state in zip(generators, start.own, strict=False):
                set_generator_state(generator, state)
            separate = SeparateDraws(start)
            with separate.drawing():
                records = iter(self._inner)
            if self._sharded and not self._seeded and self._loader.num_workers == 0:
                records = separate.iterate(records)
                close = separate.settle
            elif not self._seeded and self._loader.num_workers == 0:
                # From `start`, the interrupted run had drawn the earlier batches and one that was read ahead.
                with separate.drawing():
                    records = chain(list(islice(records, skipped + 1)), records)
            separate.settle()
        if self._compared:
            first, records = begun(records)
            self.begins_with = first[0].begins_with if first else digest_of([])
        if together:
            check_same_stream(type(self._loader.dataset).__name__, self.begins_with)
        # The limit is a number of the user's batches, and records are counted in steps.
        limit = None if limit is None else limit // self.layout.group_size
        head: list[tuple[Any, int | None]] = []
        pairs = self._pairs(records, position, skipped, limit, head)
        if self.finds_rows:
            pairs = count_rows(pairs, alone=not self._sharded)
        return Opened(pairs, start, close, head=head)

    def _drop(self, position: Position) -> int:
        dropped, group = self._dataset.dropped, self.layout.group_size
        dropped.zero_()
        before = position.batches
        if not self._loader.num_workers:
            dropped[0] = before % group
        elif position.group not in (None, group):
            # A step's batches come from one worker, so with another step size the workers gave other batches.
            for number in range(before):
                dropped[number // position.group % len(dropped)] += 1
            return 0
        # The steps that this process has yet to skip.
        return before // group

    def _pairs(
        self,
        records: Iterator[Record],
        position: Position,
        skipped: int,
        limit: int | None,
        head: list[tuple[Any, int | None]],
    ) -> Iterator[tuple[Any, BatchInfo]]:
        consumed = int(self._dataset.dropped.sum()) * (self.layout.batch_size or 1)
        for record in islice(records, skipped):
            consumed += record.global_rows
            if len(head) < self._keep:
                head.append((record.batch, batch_size_or_none(record.batch) if self.finds_rows else record.rows))
        index = position.batches // self.layout.group_size
        held: list[Any] = []  # empty while suspended, so that a batch is freed with its step
        # `with_last` reads one batch ahead, so that the last one is known to be last.
        for (batch, rows, padding, global_rows, _), last in with_last(up_to(records, limit, index)):
            held.append(batch)
            del batch
            consumed += global_rows
            yield held.pop(), BatchInfo(index, rows, padding, global_rows, last, consumed)
            index += 1


# Iterables of batches


logger = get_logger(__name__)

Pair = tuple[Any, BatchInfo]


class ReadyBatchesReader:
    """Reader for an iterable of complete batches, such as a list, of which each process keeps its own part.

    Every process iterates over all batches and keeps its own. A resumed epoch begins from the loader's own state if the
    loader has `state_dict` and `load_state_dict`. Otherwise the earlier batches are read again in the random state at
    the epoch's start.
    """

    finds_rows = reads_ahead = False

    @property
    def ends_alike(self) -> bool:
        return hasattr(self._batches, "__len__")

    def __init__(self, batches: Iterable[Any], layout: Layout, keep: int = 0) -> None:
        self._batches = batches
        self._keep = keep or (layout.group_size if layout.shard.count > 1 else 0)
        self._has_begun = False
        self.layout = layout
        layout.check()

    def __len__(self) -> int:
        return self.layout.steps(len(self._batches), last_rows(self._batches))  # type: ignore[arg-type]

    def open(self, epoch: int, position: Position, limit: int | None = None) -> Opened:
        generators = find_generators(self._batches, getattr(self._batches, "dataset", None))
        stay = getattr(self._batches, "persistent_workers", False)
        start = position.start or EpochStart.capture(generators, not (stay and self._has_begun))
        shared = self.layout.shard.count > 1
        together = shared and several_processes() and not isinstance(self._batches, list | tuple)
        if together:
            start = start.agreed()
        try:
            length: int | None = len(self._batches)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = None
        length = smallest_known(length, limit)
        own = _LoaderStates(self._batches, 2 * self.layout.group_size if length is None else 0)
        counted = bool(self._keep)
        head: list[tuple[Any, int | None]] = []
        consumed: int | None = 0 if counted else None
        close: Callable[[], None] = do_nothing
        if not together and position.start is None:
            iterator = own.resumed(position.own, position.batches) or own.begun()
            batches, consumed = _skipping(iterator, position.batches, consumed, head, self._keep)
        else:
            now = [generator_state(each) for each in generators]
            for generator, state in zip(generators, start.own, strict=False):
                set_generator_state(generator, state)
            separate = SeparateDraws(start)
            with separate.drawing():
                resumed = own.resumed(position.own, position.batches)
                if resumed is not None:
                    batches, consumed = resumed, position.samples if counted else None
                    # Creating the iterator may have drawn from the generators in another order than at the start.
                    for generator, state in zip(generators, now if position.batches else (), strict=False):
                        set_generator_state(generator, state)
                else:
                    if stay and not start.new_workers and not self._has_begun:
                        with SeparateDraws(start).drawing(), kept_generators(self._batches):
                            next(iter(self._batches), None)  # starts the workers, for which a seed is drawn
                    batches, consumed = _skipping(own.begun(), position.batches, consumed, head, self._keep)
                    if not position.batches or length is None:  # the interrupted run had also read the next batch
                        batches = chain(list(islice(batches, 1)), batches)
            if together:
                batches, close = separate.iterate(batches), separate.settle
                first, batches = begun(batches)
                check_same_stream(type(self._batches).__name__, digest_of(first))
            separate.settle()
        self._has_begun = True
        pairs = _with_infos(up_to(batches, limit, position.batches), position.batches, consumed, length, counted)
        if shared:
            pairs = pairs_of_process(distribute_pairs(pairs, self.layout, head), self.layout.shard.index)
        return Opened(pairs, start, close, own.after, head)

    def restart(self) -> None: ...


class _LoaderStates:
    def __init__(self, loader: Any, ahead: int) -> None:
        methods = (getattr(loader, name, None) for name in ("state_dict", "load_state_dict"))
        keeps = getattr(loader, "keeps_position", True)  # False for a CombinedLoader over loaders without a state
        self._loader = loader if keeps and all(map(callable, methods)) else None
        self._batches = loader
        self._workers = getattr(loader, "num_workers", 0)
        self._ahead = ahead
        self._given = 0
        self._has_ended = False
        self._kept: dict[int, Any] = {}

    def begun(self) -> Iterator[Any]:
        batches = iter(self._batches)
        return batches if self._loader is None else chain(map(self._note, batches), self._record_end())

    def _note(self, batch: Any) -> Any:
        self._given += 1
        if self._ahead:
            self._kept[self._given] = self._state()
            # Only as many states are needed as batches can be read ahead.
            self._kept.pop(self._given - self._ahead - 1, None)
        return batch

    def _record_end(self) -> Iterator[Any]:
        self._has_ended = True
        yield from ()

    def _state(self) -> dict[str, Any] | None:
        assert self._loader is not None
        # The loader may return objects that it goes on changing.
        state = copy.deepcopy(self._loader.state_dict())
        if not _is_plain(state):
            logger.warning_once(
                "The state_dict of a %s is not saved, because it contains more than numbers, text, tensors, lists and "
                "dicts. A resumed run will read the epoch's earlier batches again.",
                type(self._loader).__name__,
            )
            return None
        return {"num_workers": self._workers, "state": state, "ended": self._has_ended}

    def after(self, batches: int | None) -> dict[str, Any] | None:
        # `batches=None` asks for the state at the end of the epoch. The result None means unknown.
        if self._loader is None:
            return None
        if batches is None or batches >= self._given:
            return self._state() if self._has_ended or batches == self._given else None
        return self._kept.get(batches)

    def resumed(self, saved: Mapping[str, Any] | None, batches: int) -> Iterator[Any] | None:
        if self._loader is None or not saved:
            return None
        before, ended = saved["num_workers"], saved.get("ended", False)
        # Between epochs, torchdata's loaders have no state besides the generators that a position holds.
        if ended:
            if before == self._workers and not _is_torchdata_loader(self._loader):
                self._loader.load_state_dict(copy.deepcopy(saved["state"]))
            self._given, self._has_ended = batches, bool(batches)
            return iter(()) if batches else self.begun()
        if not batches:  # a limit ended the epoch early: the loader starts from the beginning
            return None
        if bool(before) != bool(self._workers) and _is_of_torchdata(getattr(self._loader, "sampler", None)):
            raise CheckpointError(
                f"This checkpoint within an epoch was saved with num_workers={before}. {type(self._loader).__name__} "
                f"shuffles differently with num_workers={self._workers}, so the epoch cannot be continued. "
                f"Resume with num_workers={before}. Between two epochs, num_workers may change from or to 0."
            )
        # States of torchdata hold the workers' parts, so they need an equal number of workers.
        if before != self._workers or not _restores_order(self._loader):
            return None
        self._loader.load_state_dict(copy.deepcopy(saved["state"]))
        self._given = batches
        return self.begun()


def _restores_order(loader: Any) -> bool:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return True
    # torchdata saves a sampler's position, but its order only if the sampler is torchdata's own or has a state.
    if isinstance(sampler, SequentialSampler) or callable(getattr(sampler, "state_dict", None)):
        return True
    return _is_of_torchdata(sampler)


def _is_of_torchdata(sampler: Any) -> bool:
    return type(sampler).__module__.partition(".")[0] == "torchdata"


def _is_torchdata_loader(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and any(
        kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(_is_plain(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor, np.ndarray)


def _skipping(
    batches: Iterator[Any], skipped: int, consumed: int | None, head: list[tuple[Any, int | None]], keep: int
) -> tuple[Iterator[Any], int | None]:
    for batch in islice(batches, skipped):
        rows = None if consumed is None else batch_size_or_none(batch)
        if len(head) < keep:
            head.append((batch, rows))
        consumed = None if rows is None or consumed is None else consumed + rows
    return batches, consumed


def _with_infos(
    batches: Iterator[Any], skipped: int, consumed: int | None, length: int | None, counted: bool
) -> Iterator[Pair]:

    def describe(batch: Any, number: int, last: bool = False) -> Pair:
        nonlocal consumed
        rows = batch_size_or_none(batch) if counted else None
        consumed = None if rows is None or consumed is None else consumed + rows
        return batch, BatchInfo(number, rows, 0, rows, last, consumed)

    def describe_end(given: tuple[Any, bool], number: int) -> Pair:
        return describe(given[0], number, given[1])

    numbers = count(skipped)
    followed = 0 if length is None else max(0, length - skipped - 1)  # batches that are not the last, by the length
    return chain(
        map(describe, islice(batches, followed), numbers),
        map(describe_end, with_last(batches), numbers),
    )


def pairs_of_process(steps: Iterator[list[Pair | None]], index: int) -> Iterator[Pair]:
    return (pair for step in steps if (pair := step[index]) is not None)


def distribute_pairs(
    pairs: Iterator[Pair], layout: Layout, head: Sequence[tuple[Any, int | None]] = ()
) -> Iterator[list[Pair | None]]:
    # A list for each step, with a batch or None for each process.
    steps = _steps(pairs, layout, head)
    if layout.tail is not TailPolicy.UNEVEN:
        yield from steps
        return
    # A process without a batch in the next step has its last batch in this one.
    for step, following in _with_following(steps):
        for own, next_own in zip(step, following or [None] * len(step), strict=True):
            if own is not None:
                own[1].last = next_own is None
        yield step


def _with_following(
    steps: Iterator[list[Pair | None]],
) -> Iterator[tuple[list[Pair | None], list[Pair | None] | None]]:
    step = next(steps, None)
    while step is not None:
        following = next(steps, None)
        yield step, following
        step = following


def _steps(
    pairs: Iterator[Pair], layout: Layout, first: Sequence[tuple[Any, int | None]]
) -> Iterator[list[Pair | None]]:
    group_size = layout.group_size
    head: list[Any] = []
    head_sizes: list[int] = []
    index = None
    groups = group_into_steps(pairs, layout)
    for group, final in with_last(groups) if layout.drop_last else ((each, False) for each in groups):
        batches = [batch for batch, _ in group]
        infos = [info for _, info in group]
        if index is None:
            index = infos[0].index // group_size
        if not head:
            known_rows = [*first, *((batch, info.rows) for batch, info in group)][: max(group_size, len(group))]
            head, head_sizes = [batch for batch, _ in known_rows], [rows or 1 for _, rows in known_rows]
            if layout.batch_size is None:
                layout = layout._replace(batch_size=known_rows[0][1])
        sizes = [info.rows for info in infos]
        known = all(size is not None for size in sizes)
        if not known and layout.split:
            raise DataError(
                f"split_batches=True splits each batch over {layout.shard.count} processes, but a batch of type "
                f"{type(batches[0]).__name__!r} has no rows that can be counted. Use batches that contain tensors, "
                "or omit split_batches."
            )
        # If rows cannot be counted, batches stay as they are, and only whole batches are padding.
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
            info = BatchInfo(index, rows if known or share.padding else None, share.padding, total, last, consumed)
            if not known:
                info.weights = whole_batches(share.padding, len(group))
            step.append((batch, info))
        yield step
        index += 1


def whole_batches(padding: int, real: int) -> tuple[int, int]:
    # The weights of a batch and of its step if rows cannot be counted: every real batch counts equally.
    return int(not padding), real
