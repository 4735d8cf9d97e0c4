"""Preparing a user's loader: which way it is read, and with what options."""

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
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import recorded_seed

logger = get_logger(__name__)


class SkippingLoader(DataLoader[Any]):
    """A prepared loader whose iterations begin after its first batches; made by `skip_first_batches`.

    It has no state: the epoch, the position and all attributes are those of the loader that it skips in, so that an
    epoch that was resumed through it counts, and is saved, as that loader's.

    Attributes:
        whole: The prepared loader.
        count: How many of this process's batches are left out.
    """

    def __init__(self, whole: PreparedLoader, count: int) -> None:
        self.whole = whole
        self.count = count

    if not TYPE_CHECKING:
        __setattr__ = object.__setattr__  # torch's guards attributes that are those of the loader inside

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        """How the workers of the user's loader start."""
        return self.whole.multiprocessing_context

    def __reduce__(self) -> tuple[Any, ...]:
        return SkippingLoader, (self.whole, self.count)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.count:
            self.whole.stay_in_epoch()
            if not self.whole.resumes_within:  # a position that was loaded is where the skipping would lead, and exact
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
    """Make a loader that gives this process its share of a user's loader.

    Args:
        loader: A `torch.utils.data.DataLoader`, or any iterable of batches.
        shard: Which part of the data is this process's.
        place: Puts a batch on the device. None leaves batches as they are.
        device: The kind of device and the device; where it has streams, batches are placed on one of their own.
        config: The options. `even_batches=False` turns `TailPolicy.COMPLETE` into `TailPolicy.UNEVEN`.
        tail: What happens at the end of an epoch.
        seed: The run's seed, which each sample's random state derives from. None leaves randomness to the loader.
        active: Where the loader is listed while it is iterated.
        fill: Fill a short batch up to the size of the others, also in a world of one; its rows are counted as padding.
        sends_ahead: Whether `place` only copies, so that a batch may be sent while the one before is computed on, where
            it was read by then: a micro-batch of a step, and what workers have ready.

    Returns:
        The prepared loader; `loader` itself if it is one already.

    Raises:
        ConfigurationError: If the loader cannot be prepared like this; the message states why and what to do.

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
            f"Cannot prepare a {type(loader).__name__!r} as a loader: it cannot be iterated. Give a "
            "torch.utils.data.DataLoader, or an iterable of batches.",
        )
    config = config or DataLoaderConfiguration()
    if tail is TailPolicy.COMPLETE and not config.even_batches:
        tail = TailPolicy.UNEVEN
    sources = (loader, getattr(loader, "batch_sampler", None))
    drop_last = any(getattr(each, "drop_last", False) for each in sources)
    layout = Layout(shard, TailPolicy(tail), config.split_batches, drop_last=drop_last)
    seedable = _seedable_sampler(loader, config)
    reader = _make_reader(loader, layout, config, _sample_seed_of(config, seed))
    if active is None:  # not `or`: a list of loaders that is empty is still the caller's
        active = ActiveLoaders()
    moving: dict[str, Any] = {"place": place, "device": device, "sends_ahead": sends_ahead}
    recipe = partial(prepare_loader, shard=shard, config=config, tail=tail, seed=seed, fill=fill, **moving)
    placement, stateful = overlapped(place, device, sends_ahead), config.use_stateful_dataloader
    return PreparedLoader(loader, reader, layout, placement, active, seedable, fill, stateful, recipe)


def skip_first_batches(dataloader: Iterable[Any], num_batches: int = 0) -> SkippingLoader:
    """A loader that leaves out the first batches at every iteration, for the epoch in which a run resumes.

    Of a map-style dataset nothing is read that is skipped.

    Args:
        dataloader: A prepared loader, or one as for `prepare_loader`, which is then prepared for one process.
        num_batches: How many of this process's batches to skip.

    Returns:
        A view of the loader, whose epochs and position it shares: after the epoch that was resumed, iterate the loader
        itself.

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
    """Whether a loader is torch's own: a subclass with an iteration of its own is more than its dataset and sampler."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _make_reader(loader: Any, layout: Layout, config: DataLoaderConfiguration, seed: int | None) -> Reader:
    """The way to read this kind of loader."""
    sharded = layout.shard.count > 1
    plain = is_plain(loader)
    if plain and isinstance(loader.dataset, IterDataPipe):
        if sharded:
            raise ConfigurationError(
                f"The dataset {type(loader.dataset).__name__} is a data pipe, which torch has deprecated and shards "
                "between processes by itself. Give a torch.utils.data.IterableDataset instead.",
            )
        plain = False
    streams = plain and isinstance(loader.dataset, IterableDataset)
    dispatch, compared = config.dispatch_batches, False
    if dispatch is None:
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
    alone_layout = layout._replace(shard=DataShard(), split=False)
    layout = layout._replace(batch_size=size)
    return DispatchReader(lambda: make(alone_layout, keep=layout.group_size), layout, loader, compared)


def _sample_seed_of(config: DataLoaderConfiguration, seed: int | None) -> int | None:
    """The seed for samples, or None where they are not seeded."""
    if config.seed_samples is False:
        return None
    if config.seed_samples and seed is None:
        seed = recorded_seed()
        if seed is None:
            raise ConfigurationError(
                "seed_samples=True derives each sample's random state from the run's seed, but the run has none. Call "
                "set_seed(...) before the loader is prepared, or leave seed_samples out.",
            )
    return seed


def _seedable_sampler(loader: Any, config: DataLoaderConfiguration) -> SeedableSampler | None:
    """A seeded generator for a RandomSampler, if asked for."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if sampler is None:  # one may have no length, which its truth value would ask for
        sampler = getattr(loader, "sampler", None)
    if not config.use_seedable_sampler or type(sampler) is not RandomSampler:
        return None
    seed = config.data_seed if config.data_seed is not None else recorded_seed()
    return SeedableSampler(sampler, torch.initial_seed() if seed is None else seed)
