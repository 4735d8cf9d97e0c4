"""Prepared loaders under Accelerate's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from drivetrain.compat.accelerate.absent import INTERNAL, absent_names
from drivetrain.compat.accelerate.state import GradientState, PartialState
from drivetrain.compat.accelerate.utils.imports import package_available
from drivetrain.data import (
    ActiveLoaders,
    DataLoaderConfiguration,
    DataShard,
    PreparedLoader,
    SkippingLoader,
    TailPolicy,
    prepare_loader,
)
from drivetrain.data import skip_first_batches as skip_in
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.pytrees import send_to_device
from drivetrain.runtime.seeds import recorded_seed

if TYPE_CHECKING:
    from drivetrain.compat.accelerate.accelerator import Accelerator

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]

_TORCHDATA = "torchdata.stateful_dataloader"

__getattr__ = absent_names(__name__, (INTERNAL, ["MpDeviceLoaderWrapper"]))


class DataLoaderAdapter:
    """Base class of all loaders of this module, for `isinstance` checks in scripts."""


class DataLoaderStateMixin:
    """Base class of the loaders that an Accelerator has prepared, for `isinstance` checks in scripts."""


class DataLoaderShard(PreparedLoader, DataLoaderAdapter, DataLoaderStateMixin):
    """Prepared data loader with the attributes that only Accelerate's scripts use.

    Attributes:
        accelerator: The Accelerator that prepared the loader, or None.
        rng_types: Accepted without effect: the order is always the same on all processes.
        synchronized_generator: Accepted without effect, like `rng_types`.
    """

    _is_accelerate_prepared = True
    _device: torch.device | None = None
    accelerator: Accelerator | None = None
    rng_types: Sequence[Any] | None = None
    synchronized_generator: torch.Generator | None = None

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        made = _made_by_hand(dataset, device, _non_blocking, use_stateful_dataloader, kwargs)
        vars(self).update(vars(made))
        self._device, self.rng_types, self.synchronized_generator = device, rng_types, synchronized_generator
        if skip_batches:
            self.skip(skip_batches)
        _show_stateful(self, use_stateful_dataloader)

    def __reduce__(self) -> tuple[Any, ...]:
        kind = DataLoaderDispatcher if isinstance(self, DataLoaderDispatcher) else DataLoaderShard
        return _again, (kind, self._device, *super().__reduce__())

    @property
    def device(self) -> torch.device | None:
        """Device that batches are moved to, or None if batches stay where the dataset puts them."""
        return self._device

    @property
    def iteration(self) -> int:
        """Epoch of the current or next iteration. It can be assigned between iterations."""
        return self.epoch + (self.current is None and self.reached_end)

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        return self.loader if name == "base_dataloader" else super().__getattr__(name)

    @property
    def gradient_state(self) -> GradientState:
        """State of the accumulation window of this loader's Accelerator, or of the latest Accelerator."""
        return self.accelerator.gradient_state if self.accelerator is not None else GradientState()

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if the loader resumes mid-epoch after `load_state`."""
        return self.stateful

    @property
    def skip_batches(self) -> int:
        """Always 0: `skip_first_batches` returns a separate loader that skips batches."""
        return 0

    @property
    def _drop_last(self) -> bool:
        return bool(getattr(self.loader, "drop_last", False))


class SkipDataLoader(SkippingLoader, DataLoaderAdapter):
    """Return type of `skip_first_batches`. Assigning its epoch sets the epoch of the wrapped loader."""

    _is_accelerate_prepared = True

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(_made_by_hand(dataset, None, False, use_stateful_dataloader, kwargs), skip_batches)
        _show_stateful(self, use_stateful_dataloader)

    @property
    def iteration(self) -> int:
        """Epoch of the current or next iteration."""
        return self.whole.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.whole.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        return self.whole.loader if name == "base_dataloader" else super().__getattr__(name)

    @property
    def skip_batches(self) -> int:
        """Number of batches that are skipped."""
        return self.count

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the wrapped loader."""
        return self.whole.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the wrapped loader at a position that `state_dict` returned."""
        self.whole.load_state_dict(state)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> SkipDataLoader:
    """Skip the first batches of a loader with `drivetrain.data.skip_first_batches`."""
    view = skip_in(dataloader, num_batches)
    view.__class__ = SkipDataLoader
    _show_stateful(view, view.stateful)
    return view  # type: ignore[return-value]


def _made_by_hand(
    dataset: Any, device: torch.device | None, non_blocking: bool, stateful: bool, options: Mapping[str, Any]
) -> PreparedLoader:
    """Create a loader that yields all its batches on this process, for scripts that construct the class."""
    place = None if device is None else lambda batch: send_to_device(batch, device, non_blocking)
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    kind: type[DataLoader[Any]] = DataLoader
    if stateful and package_available(_TORCHDATA):
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    return _prepared(kind(dataset, **options), DataShard(0, 1), config, place)


def _again(kind: type, device: torch.device | None, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Create a copy of a prepared loader, which belongs to no Accelerator."""
    loader = make(*arguments)
    loader.__class__ = kind
    loader._device = device
    _show_stateful(loader, loader.stateful)
    return loader


class DataLoaderDispatcher(DataLoaderShard):
    """Prepared data loader of which rank 0 reads the data and sends every rank its part."""


class SeedableRandomSampler(RandomSampler):
    """Sampler whose random order depends only on the seed and the epoch."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        seed = recorded_seed() if data_seed is None else data_seed
        self.initial_seed = int(torch.initial_seed()) if seed is None else seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """Batch sampler that yields one process's share of another batch sampler's batches.

    Args:
        batch_sampler: Sampler of the batches of all processes. If it has no `batch_size`, batch sizes may differ.
        num_processes: Number of processes.
        process_index: Rank whose batches are yielded.
        split_batches: If True, each process gets a part of every batch. Otherwise processes get whole batches in turn.
        even_batches: If True, the last step is filled up with samples of the first one.

    Raises:
        ConfigurationError: `split_batches` is set, and the batch size is unknown or not a multiple of `num_processes`.
    """

    batch_size: Any

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ConfigurationError(
                f"split_batches=True requires a batch sampler whose batch_size is a round multiple of num_processes="
                f"{num_processes}, and it is {self.batch_size}.",
            )

    def __iter__(self) -> Iterator[list[int]]:
        return self._split() if self.split_batches else self._in_turn()

    def _split(self) -> Iterator[list[int]]:
        own = self.batch_size // self.num_processes
        mine = slice(own * self.process_index, own * (self.process_index + 1))
        first: list[int] = []
        for batch in map(list, self.batch_sampler):
            first = first or batch
            missing = self.batch_size - len(batch)
            if missing and self.drop_last:
                continue
            if missing and self.even_batches:
                batch += islice(cycle(first), missing)
            if batch[mine]:
                yield batch[mine]

    def _in_turn(self) -> Iterator[list[int]]:
        first: list[list[int]] = []
        step: list[list[int]] = []
        for batch in map(list, self.batch_sampler):
            if len(step) == self.num_processes:
                yield step[self.process_index]
                step = []
            step.append(batch)
            if len(first) < self.num_processes:
                first.append(list(batch))
        is_whole = len(step) == self.num_processes and self.batch_size in (None, *map(len, step[-1:]))
        if self.even_batches and step and not is_whole and not self.drop_last:
            self._complete(step, first)
        if self.process_index < len(step) and (is_whole or not self.drop_last):
            yield step[self.process_index]

    def _complete(self, step: list[list[int]], first: Sequence[list[int]]) -> None:
        """Fill the last step: repeat whole batches if their sizes vary, else repeat samples."""
        if self.batch_size is None:
            step += islice(cycle(first), self.num_processes - len(step))
            return
        filler = cycle(chain.from_iterable(first))
        step += [[] for _ in range(self.num_processes - len(step))]
        for batch in step:
            batch += islice(filler, self.batch_size - len(batch))

    def __len__(self) -> int:
        if self.split_batches:
            return len(self.batch_sampler)
        steps, rest = divmod(len(self.batch_sampler), self.num_processes)
        return steps + (not self.drop_last and rest > (0 if self.even_batches else self.process_index))

    @property
    def total_length(self) -> int:
        """Number of batches of all processes together."""
        return len(self.batch_sampler)


class IterableDatasetShard(IterableDataset[Any]):
    """One process's share of an iterable dataset."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index, self.split_batches = num_processes, process_index, split_batches

    def __iter__(self) -> Iterator[Any]:
        own = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        whole = own * self.num_processes
        first: list[Any] = []
        batch: list[Any] = []
        for sample in self.dataset:
            batch.append(sample)
            if len(batch) == whole:
                yield from self._mine(batch, own)
                first = first or list(batch)
                batch = []
        if batch and not self.drop_last:
            filler = first or list(batch)
            while len(batch) < whole:
                batch.extend(filler)
            yield from self._mine(batch[:whole], own)

    def _mine(self, batch: list[Any], own: int) -> list[Any]:
        return batch[self.process_index * own : (self.process_index + 1) * own]

    def __len__(self) -> int:
        total = len(self.dataset)  # type: ignore[arg-type]
        own = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        whole = own * self.num_processes
        return (total // whole if self.drop_last else -(-total // whole)) * own

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch`, if it has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class SkipBatchSampler(BatchSampler):
    """Batch sampler that skips the first batches of another one."""

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batch_sampler):
            if index >= self.skip_batches:
                yield batch

    @property
    def total_length(self) -> int:
        """Number of batches including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler of a data loader or of its batch sampler, or None."""
    return getattr(getattr(dataloader, "batch_sampler", None), "sampler", None) or getattr(dataloader, "sampler", None)


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard:
    """Prepare a data loader without an Accelerator."""
    state = PartialState()
    shard = DataShard(
        state.process_index if process_index is None else process_index,
        state.num_processes if num_processes is None else num_processes,
    )
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
    )
    target = state.device if device is None else device
    place = (lambda batch: send_to_device(batch, target, non_blocking)) if put_on_device else None
    return shown_as_prepared(_prepared(dataloader, shard, config, place), dispatch_batches)


def shown_as_prepared(loader: PreparedLoader, dispatch: bool | None) -> DataLoaderShard:
    """Change a loader's class to `DataLoaderDispatcher` or `DataLoaderShard`. Return the same object."""
    streams = isinstance(getattr(loader.loader, "dataset", None), IterableDataset)
    loader.__class__ = DataLoaderDispatcher if (streams if dispatch is None else dispatch) else DataLoaderShard
    _show_stateful(loader, loader.stateful)
    return loader  # type: ignore[return-value]


def _show_stateful(loader: DataLoader[Any], stateful: bool) -> None:
    """Make a stateful loader also an instance of torchdata's `StatefulDataLoader`, if torchdata is installed."""
    if stateful:
        loader.__class__ = _stateful_kinds().get(type(loader), type(loader))


@functools.cache
def _stateful_kinds() -> dict[type, type]:
    """Return a subclass of each loader class that is torchdata's too. Empty if torchdata is not installed."""
    if not package_available(_TORCHDATA):
        return {}
    from torchdata.stateful_dataloader import StatefulDataLoader

    kinds = (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader)
    return {kind: type(f"Stateful{kind.__name__}", (kind, StatefulDataLoader), {}) for kind in kinds}


def _prepared(
    loader: Any, shard: DataShard, config: DataLoaderConfiguration, place: Callable[[Any], Any] | None = None
) -> PreparedLoader:
    return prepare_loader(
        loader,
        shard=shard,
        place=place,
        config=config,
        tail=TailPolicy.COMPLETE if config.even_batches else TailPolicy.UNEVEN,
        seed=recorded_seed(),
        active=ActiveLoaders(),
    )
