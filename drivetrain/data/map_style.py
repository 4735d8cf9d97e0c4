"""Reader of this process's share of a map-style dataset."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.configuration import DataShard
from drivetrain.data.order import IndexOrder, InterleavingSampler, Position
from drivetrain.data.reader import Opened, count_rows, do_nothing, last_rows, rebuilt, smallest_known, up_to
from drivetrain.data.seeding import SeededBatches, ShowUsersDataset, as_is, is_deterministic, is_deterministic_collate
from drivetrain.data.sharding import Head, Layout, check_same_dataset, shard_batches
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import ConfigurationError, DataError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import batch_size_or_none
from drivetrain.runtime.seeds import (
    EpochStart,
    SeparateDraws,
    find_generators,
    isolated_random_state,
    sample_seed,
    set_generator_state,
    several_processes,
)

# Fast reading of a TensorDataset, one batch instead of one sample at a time


Gather = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the rows of a tensor at an index tensor."""

_OWN_READING = {kind: kind.__getitem__ for kind in (TensorDataset, Subset)}


def gathered(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.index_select(0, index)


def gathered_pinned(tensor: Tensor, index: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        return gathered(tensor, index)
    # torch reuses freed pinned memory only after all copies from it to a device have finished, so no buffer is
    # overwritten during a copy.
    rows = torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, index, out=rows)


def can_pin() -> bool:
    if not torch.accelerator.is_available():
        return False
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type != "mps"


class WholeBatches(Dataset[Any]):
    def __init__(self, dataset: Any, gather: Gather = gathered) -> None:
        self.dataset, self._gather = dataset, gather

    def __reduce__(self) -> tuple[Any, ...]:
        return WholeBatches, (self.dataset,)  # spawned workers do not gather into pinned memory

    def __getitems__(self, indices: Sequence[int]) -> Any:
        try:
            # The dataset may change between batches, so it is inspected for each one.
            batch = read_at_once(self.dataset, indices, self._gather)
        except (IndexError, TypeError, ValueError, RuntimeError):
            batch = None  # reading sample by sample below raises the usual error for a wrong index
        return default_collate(self._samples(indices)) if batch is None else batch

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        if getattr(self.dataset, "__getitems__", None):
            samples: list[Any] = self.dataset.__getitems__(indices)
            return samples
        return [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)


def may_be_read_at_once(dataset: Any) -> bool:
    while _is_as_in_torch(dataset, Subset):
        dataset = dataset.dataset
    return _is_as_in_torch(dataset, TensorDataset)


def read_at_once(dataset: Any, indices: Sequence[int], gather: Gather = gathered) -> list[Tensor] | None:
    while _is_as_in_torch(dataset, Subset):
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    if not indices or not _is_as_in_torch(dataset, TensorDataset) or not _collates_as_in_torch():
        return None
    if any(type(tensor) is not Tensor or tensor.layout is not torch.strided for tensor in dataset.tensors):
        return None
    numbers = np.array(indices)  # seven times faster than torch.tensor for a list
    # Indices other than integers are left to the dataset.
    if numbers.dtype.kind != "i":
        return None
    index = torch.from_numpy(numbers.astype(np.int64, copy=False))
    return [gather(each, index if each.device.type == "cpu" else index.to(each.device)) for each in dataset.tensors]


def _is_as_in_torch(dataset: Any, kind: type) -> bool:
    # False also if torch's own methods for reading samples have been replaced.
    return type(dataset) is kind and "__getitems__" not in vars(dataset) and kind.__getitem__ is _OWN_READING[kind]


def _collates_as_in_torch() -> bool:
    # Users can register their own functions for collating in this map.
    plain = default_collate_fn_map.get(Tensor) is collate_tensor_fn
    return plain and not any(isinstance((), kind) for kind in default_collate_fn_map)


logger = get_logger(__name__)

WITHOUT_WORKERS: dict[str, Any] = {
    "num_workers": 0,
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
}


class IndexStream:
    def __init__(self) -> None:
        self.begin: Callable[[], Iterator[Any]] = _nothing

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


class MapReader:
    """Reader for a map-style dataset, which gives this process its share of the batches that the sampler draws."""

    def __init__(
        self,
        loader: DataLoader[Any],
        layout: Layout,
        seed: int | None,
        keep: int = 0,
    ) -> None:
        self._loader = loader
        self.order = IndexOrder(loader)
        self._keep = keep
        self._compared = False  # True once all processes have compared their datasets
        self.finds_rows = not self.order.batched or not loader.in_order
        distributed = self.order.distributed_sampler
        self._replicas = 1
        if distributed is not None:
            self._replicas = distributed.num_replicas
            # The user's DistributedSampler shards by itself, so each process uses all of it.
            layout = layout._replace(shard=DataShard(), split=False)
            _warn_of(distributed)
        self.layout = layout._replace(batch_size=self.order.batch_size)
        self.layout.check()
        if not loader.in_order and self.layout.shard.count > 1:
            raise ConfigurationError(
                "This DataLoader has in_order=False, so the order of its batches differs from run to run and between "
                "processes. Leave in_order at True if there are several processes.",
            )
        self._stream = IndexStream()
        self._workers_are_there = False
        self._seeded = seed is not None and not (
            is_deterministic(loader.dataset) and is_deterministic_collate(loader.collate_fn)
        )
        self._seed = seed
        self._inner = self._make_inner(self._stream)

    def _make_inner(self, stream: IndexStream, **changes: Any) -> DataLoader[Any]:
        loader, batched = self._loader, self.order.batched
        if self._seed is not None and self._seeded:
            return rebuilt(
                loader,
                SeededBatches(loader.dataset, loader.collate_fn, self._seed, batched),
                batch_size=None,
                sampler=stream,
                collate_fn=as_is,
                worker_init_fn=ShowUsersDataset(loader.worker_init_fn),
                **changes,
            )
        if self._reads_at_once():
            alone = changes.get("num_workers", loader.num_workers) == 0
            gather = gathered_pinned if alone and loader.pin_memory and can_pin() else gathered
            whole, init = WholeBatches(loader.dataset, gather), ShowUsersDataset(loader.worker_init_fn)
            return rebuilt(loader, whole, batch_sampler=stream, collate_fn=as_is, worker_init_fn=init, **changes)
        if batched:
            return rebuilt(loader, loader.dataset, batch_sampler=stream, **changes)
        return rebuilt(loader, loader.dataset, batch_size=None, sampler=stream, **changes)

    def _reads_at_once(self) -> bool:
        plain = self.order.batched and self._loader.collate_fn is default_collate
        return plain and may_be_read_at_once(self._loader.dataset) and not (self._seed is not None and self._seeded)

    def restart(self) -> None:
        if self._workers_are_there:
            self._inner, self._workers_are_there = self._make_inner(self._stream), False

    def __len__(self) -> int:
        return self.layout.steps(len(self.order), last_rows(self._loader))

    @property
    def reads_ahead(self) -> bool:
        return self._inner.num_workers > 0 and self.order.draws_at_once

    @property
    def ends_alike(self) -> bool:
        try:
            return len(self.order) >= 0
        except (TypeError, NotImplementedError):
            return False

    def open(self, epoch: int, position: Position, limit: int | None = None) -> Opened:
        infos: deque[BatchInfo] = deque()
        requests = _Requests(self.order, self.layout, self._replicas, self._seeded)
        generators = find_generators(self._loader, self.order.source, self.order.sampler)
        start = position.start or EpochStart.capture(generators, not self._workers_are_there)
        sharded = self.layout.shard.count > 1
        together = several_processes() and not self._keep and self._replicas == 1
        head: list[tuple[Any, int | None]] = []
        close: Callable[[], None] = do_nothing
        if not sharded and not together and position == Position():
            # Draw every random number at the time at which torch's DataLoader draws it.
            order, length = self.order, smallest_known(self.order.reported_length(), limit)

            def begin() -> Iterator[Any]:
                batches = up_to(order.batches(order.plain_iterator()), limit)
                return requests.indices_of_process(batches, infos, epoch, length=length)

            self._stream.begin = begin
            # torch draws a seed from this generator when it starts workers.
            self._inner.generator = torch.Generator() if self._workers_are_there else self._loader.generator
        else:
            if together:
                start = start.agreed()
            for generator, state in zip(generators, start.own, strict=False):
                set_generator_state(generator, state)
            follow, check = sharded or together, together and sharded
            if check and not self._compared:
                check_same_dataset(self._loader.dataset)
                self._compared = True
            close, first = self._open_apart(requests, infos, epoch, position, start, limit, follow=follow, check=check)
            if first is not None and self._keep:
                head = self._read_padding(first, requests, epoch)
        batches = iter(self._inner)
        self._stream.begin = _nothing
        self._workers_are_there = self._loader.num_workers > 0 and self._loader.persistent_workers
        # Not zip, which keeps a reference to its latest tuple.
        pairs: Iterator[tuple[Any, BatchInfo]] = map(_as_pair, batches, iter(infos.popleft, None))
        if self.finds_rows:
            pairs = count_rows(pairs, alone=not sharded and self._replicas == 1)
        return Opened(pairs, start, close, head=head)

    def _read_padding(self, head: Head, requests: _Requests, epoch: int) -> list[tuple[Any, int | None]]:
        # These batches pad the last ones of the epoch.
        stream, samples = IndexStream(), iter(head.samples)
        batches = (list(islice(samples, size)) for size in head.sizes)
        stream.begin = lambda: requests.indices_of_process(batches, deque(), epoch)
        # A few samples do not need worker processes.
        inner = self._make_inner(stream, **WITHOUT_WORKERS)
        # A new generator, because a DataLoader draws a seed from it.
        inner.generator = torch.Generator()
        with isolated_random_state():
            found = list(inner)
        sizes: Sequence[int | None] = [batch_size_or_none(each) for each in found] if self.finds_rows else head.sizes
        return list(zip(found, sizes, strict=True))

    def _open_apart(
        self,
        requests: _Requests,
        infos: deque[BatchInfo],
        epoch: int,
        position: Position,
        start: EpochStart,
        limit: int | None,
        *,
        follow: bool,
        check: bool,
    ) -> tuple[Callable[[], None], Head | None]:
        order, separate = self.order, SeparateDraws(start)
        head: Head | None = None
        skipped = 0
        with separate.drawing():
            # Repeat the calls of torch's DataLoader in their order, to draw equal random numbers.
            iterator = order.plain_iterator()
            base_seed = 0
            if start.new_workers:
                base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator).item())
                if self._loader.num_workers > 0:
                    iterator = order.plain_iterator()
            # Workers of different processes must not draw the same random numbers.
            own_seed = sample_seed(base_seed, epoch, self.layout.shard.index)
            self._inner.generator = torch.Generator().manual_seed(own_seed)
            if position.batches or position.samples:
                keep = self._keep or (self.layout.group_size if self.layout.shard.count > 1 else 0)
                batches, head, skipped = order.from_position(iterator, position, keep)
            else:
                batches = order.batches(iterator)
            # A DistributedSampler gives this process only its own part of the earlier batches.
            before = position.batches // self._replicas
            batches = up_to(batches, limit, before)
            if order.draws_at_once:
                batches = _started(batches)
        draws_later = follow and not order.draws_at_once
        if draws_later:
            batches = separate.iterate(batches)
        if check and not order.draws_at_once:
            batches = _agreed(batches, order.sampler if order.regular else order.source)
        length = None if follow else smallest_known(order.reported_length(), limit)
        if length is not None:
            length -= before
        index = before // self.layout.group_size
        indices = requests.indices_of_process(batches, infos, epoch, index, skipped, head, length)
        if draws_later:
            indices = _started(indices)
        separate.settle()
        self._stream.begin = lambda: indices
        return separate.settle if draws_later else do_nothing, head


class _Requests(NamedTuple):
    # No reference to the loader: an abandoned iteration must not keep persistent workers alive.
    order: IndexOrder
    layout: Layout
    replicas: int
    seeded: bool

    def indices_of_process(
        self,
        batches: Iterator[Any],
        infos: deque[BatchInfo],
        epoch: int,
        index: int = 0,
        consumed: int = 0,
        head: Head | None = None,
        length: int | None = None,
    ) -> Iterator[Any]:
        shares = shard_batches(batches, self.layout, index=index, consumed=consumed, head=head, length=length)
        order, replicas, seeded, note = self.order, self.replicas, self.seeded, infos.append
        batched = order.batched
        info = None
        if batched and not seeded and replicas == 1:
            for indices, info in shares:
                note(info)
                yield indices
        else:
            for indices, info in shares:
                if replicas > 1:  # a DistributedSampler has sharded: its samples are this process's only
                    consumed += len(indices) * replicas
                    info.consumed, info.global_rows = consumed, None
                note(info)
                wanted = indices if batched else indices[0]
                yield (epoch, wanted) if seeded else wanted
        if length is not None and info is not None:
            order.record_end(info.index + 1, info.last)


def _nothing() -> Iterator[Any]:
    return iter(())


def _as_pair(batch: Any, info: BatchInfo) -> tuple[Any, BatchInfo]:
    return batch, info


def _started(items: Iterator[Any]) -> Iterator[Any]:
    # Reading the first item makes samplers draw their order now.
    return chain(list(islice(items, 1)), items)


def _agreed(batches: Iterator[Sequence[Any]], source: Any) -> Iterator[Sequence[Any]]:
    # All processes must call it, because they compare their first batches of indices.
    batches = iter(batches)
    first = list(islice(batches, 1))
    digests = gather_object([hashlib.blake2b(repr(first).encode(), digest_size=16).hexdigest()])
    if len(set(digests)) > 1:
        raise DataError(
            f"{type(source).__name__} returns a different order in each process, so samples would be repeated and "
            "omitted. Its random generator was not found. Keep the generator in an attribute of the sampler, use the "
            "same seed in all processes, or set dispatch_batches=True, so that only rank 0 reads."
        )
    return chain(first, batches)


def _warn_of(sampler: Any) -> None:
    if isinstance(sampler, InterleavingSampler):
        return
    logger.info_once("The loader has a %s, which shards by itself; it is not sharded again.", type(sampler).__name__)
    try:
        repeated = int(sampler.total_size) - len(sampler.dataset)
    except (AttributeError, TypeError):
        return
    if repeated > 0:
        logger.warning_once(
            "%s repeats %d samples to fill all processes equally, and these count twice in gathered metrics. Remove "
            "the sampler (use shuffle=True instead): prepared loaders shard the data and recognise padding themselves.",
            type(sampler).__name__,
            repeated,
        )
