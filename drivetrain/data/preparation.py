"""Preparation of a user's loader: choice of the reader, and its options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, RandomSampler

from drivetrain.data.batch_info import ActiveLoaders
from drivetrain.data.configuration import DataLoaderConfiguration, DataShard, TailPolicy
from drivetrain.data.dispatch import DispatchReader
from drivetrain.data.iterable import ReadyBatchesReader, StreamReader
from drivetrain.data.loader import PreparedLoader, checked_count
from drivetrain.data.map_style import MapReader
from drivetrain.data.order import SeedableSampler
from drivetrain.data.placement import Place, overlapped
from drivetrain.data.reader import Reader
from drivetrain.data.sharding import Layout
from drivetrain.runtime import observer
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import recorded_seed

logger = get_logger(__name__)


class SkippingLoader(DataLoader[Any]):
    """DataLoader that reads from a prepared loader, but leaves out its first `count` batches.

    It has no own state. The epoch, the position and all attributes are those of the prepared loader. An epoch that is
    resumed through the view therefore counts as that loader's epoch.

    Attributes:
        whole: The prepared loader.
        count: Number of this process's batches that are skipped.
    """

    def __init__(self, whole: PreparedLoader, count: int) -> None:
        self.whole = whole
        self.count = count

    if not TYPE_CHECKING:
        __setattr__ = object.__setattr__  # DataLoader's own refuses attributes that belong to the wrapped loader

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        return self.whole.multiprocessing_context

    def __reduce__(self) -> tuple[Any, ...]:
        return SkippingLoader, (self.whole, self.count)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.count:
            self.whole.stay_in_epoch()
            if not self.whole.resumes_within:  # a loaded position already is after the skipped batches, and exact
                self.whole.skip(self.count, in_loaded_order=True)
        return iter(self.whole)

    def __len__(self) -> int:
        return max(0, len(self.whole) - self.count)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __repr__(self) -> str:
        return f"SkippingLoader({self.whole!r}, without its first {self.count} batches)"


def prepare_loader(
    loader: Iterable[Any],
    *,
    shard: DataShard,
    place: Place | None = None,
    device: tuple[DeviceKind, torch.device] | None = None,
    config: DataLoaderConfiguration | None = None,
    tail: TailPolicy = TailPolicy.COMPLETE,
    seed: int | None = None,
    active: ActiveLoaders | None = None,
    fill: bool = False,
    sends_ahead: bool = False,
) -> PreparedLoader:
    """Return a loader that gives this process its share of the batches, on the device.

    Args:
        loader: A `torch.utils.data.DataLoader`, or any iterable of batches.
        shard: Part of the data that this process reads.
        place: Function that moves a batch to the device, or None to leave batches unchanged.
        device: Device kind and device. If the device has streams, batches are copied on a separate one.
        config: Options. `even_batches=False` turns `TailPolicy.COMPLETE` into `TailPolicy.UNEVEN`.
        tail: Policy for the end of an epoch.
        seed: The run's seed, from which each sample's random state is derived. If None, the loader's own randomness is
            not changed.
        active: List in which the loader is entered while it is iterated.
        fill: Pad a short batch to the size of the others, even for a single process. The rows count as padding.
        sends_ahead: True if `place` only copies, so that a batch that has already been read may be copied while the
            previous one is being processed.

    Returns:
        The prepared loader, or `loader` itself if it is one.

    Raises:
        ConfigurationError: If the loader cannot be prepared with these options. The message has the reason and what to
            do.

    Example:
        ```python
        loader = prepare_loader(DataLoader(dataset, batch_size=32), shard=DataShard(0, 2))
        for batch in loader:
            print(loader.current.padding)
        ```
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(
            f"Cannot prepare a {type(loader).__name__!r} as a loader: it cannot be iterated. Use a "
            "torch.utils.data.DataLoader, or an iterable of batches.",
        )
    if observer.current is not None:
        loader = observer.current.loader(loader)
    config = config or DataLoaderConfiguration()
    if tail is TailPolicy.COMPLETE and not config.even_batches:
        tail = TailPolicy.UNEVEN
    sources = (loader, getattr(loader, "batch_sampler", None))
    drop_last = any(getattr(each, "drop_last", False) for each in sources)
    layout = Layout(shard, TailPolicy(tail), config.split_batches, drop_last=drop_last)
    seedable = _seedable_sampler(loader, config)
    reader = _make_reader(loader, layout, config, _sample_seed_of(config, seed))
    if active is None:  # not `or`, because an empty ActiveLoaders is false
        active = ActiveLoaders()
    moving: dict[str, Any] = {"place": place, "device": device, "sends_ahead": sends_ahead}
    recipe = partial(prepare_loader, shard=shard, config=config, tail=tail, seed=seed, fill=fill, **moving)
    placement, stateful = overlapped(place, device, sends_ahead), config.use_stateful_dataloader
    return PreparedLoader(loader, reader, layout, placement, active, seedable, fill, stateful, recipe)


def skip_first_batches(dataloader: Iterable[Any], num_batches: int = 0) -> SkippingLoader:
    """Return a view of a loader without its first batches, to continue an interrupted epoch.

    Skipped samples of a map-style dataset are not read.

    Args:
        dataloader: A prepared loader. Any other loader is first prepared for one process.
        num_batches: Number of this process's batches to skip.

    Returns:
        A view that shares the loader's epochs and position. After the resumed epoch, iterate over the loader itself.

    Example:
        ```python
        for batch in skip_first_batches(loader, 100):
            ...
        ```
    """
    count = checked_count(num_batches)
    if isinstance(dataloader, SkippingLoader):
        return SkippingLoader(dataloader.whole, dataloader.count + count)
    return SkippingLoader(prepare_loader(dataloader, shard=DataShard()), count)


def is_plain(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _make_reader(loader: Any, layout: Layout, config: DataLoaderConfiguration, seed: int | None) -> Reader:
    sharded = layout.shard.count > 1
    plain = is_plain(loader)
    if plain and isinstance(loader.dataset, IterDataPipe):
        if sharded:
            raise ConfigurationError(
                f"The dataset {type(loader.dataset).__name__} is a data pipe, which torch has deprecated and shards "
                "between processes by itself. Use a torch.utils.data.IterableDataset instead.",
            )
        plain = False
    streams = plain and isinstance(loader.dataset, IterableDataset)
    dispatch, compared = config.dispatch_batches, False
    if dispatch is None:
        # By default, only rank 0 reads an iterable dataset.
        dispatch, compared = streams, streams and sharded

    def make(layout: Layout, keep: int = 0) -> Reader:
        if not plain:
            return ReadyBatchesReader(loader, layout, keep)
        if streams:
            return StreamReader(loader, layout, seed, compared, keep)
        return MapReader(loader, layout, seed, keep)

    if not (dispatch and sharded):
        return make(layout)
    size = loader.batch_size if plain else None
    # Rank 0 reads whole batches like a single process, and `DispatchReader` shards them.
    alone_layout = layout._replace(shard=DataShard(), split=False)
    layout = layout._replace(batch_size=size)
    return DispatchReader(lambda: make(alone_layout, keep=layout.group_size), layout, loader, compared)


def _sample_seed_of(config: DataLoaderConfiguration, seed: int | None) -> int | None:
    if config.seed_samples is False:
        return None
    if config.seed_samples and seed is None:
        seed = recorded_seed()
        if seed is None:
            raise ConfigurationError(
                "seed_samples=True derives each sample's random state from the run's seed, but the run has none. Call "
                "set_seed(...) before the loader is prepared, or omit seed_samples.",
            )
    return seed


def _seedable_sampler(loader: Any, config: DataLoaderConfiguration) -> SeedableSampler | None:
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if sampler is None:  # not `or`, because the truth value of a sampler without a length raises
        sampler = getattr(loader, "sampler", None)
    if not config.use_seedable_sampler or type(sampler) is not RandomSampler:
        return None
    seed = config.data_seed if config.data_seed is not None else recorded_seed()
    return SeedableSampler(sampler, torch.initial_seed() if seed is None else seed)
