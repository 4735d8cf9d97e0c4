"""`Reader`, the protocol of the classes that read a loader, and their common helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.order import Position
from drivetrain.data.sharding import Layout
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import batch_size_or_none
from drivetrain.runtime.seeds import EpochStart, several_processes

logger = get_logger(__name__)

Item = TypeVar("Item")


class Opened(NamedTuple):
    """Iteration that a `Reader` has started: its remaining batches, and a function to call when it has ended.

    Attributes:
        pairs: This process's batches, each with its `BatchInfo`.
        start: Random state from which the epoch's order is drawn.
        close: Called when the iteration has ended.
        own_state: Returns the state of the user's loader after a number of its batches (None for the end of the epoch),
            or None if unknown. It is None for loaders without a state.
        head: First batches of the epoch with their rows, from which padding is made, if the iteration begins after
            them. It is filled when the first pair is read.
    """

    pairs: Iterator[tuple[Any, BatchInfo]]
    start: EpochStart
    close: Callable[[], None]
    own_state: Callable[[int | None], Mapping[str, Any] | None] | None = None
    head: Sequence[tuple[Any, int | None]] = ()


class Reader(Protocol):
    """Interface of readers, which iterate over a user's loader and yield the batches of one process.

    Attributes:
        layout: How batches are shared between processes. It may be changed between iterations.
        finds_rows: True if the rows of a batch are known only after this process has read it.
    """

    layout: Layout
    finds_rows: bool

    @property
    def ends_alike(self) -> bool:
        # True if equally long loaders give every process equally many batches.
        ...

    @property
    def reads_ahead(self) -> bool:
        # True if reading the next batch early changes no result: workers read ahead anyway, and the order is drawn.
        ...

    def open(self, epoch: int, position: Position, limit: int | None = None) -> Opened: ...

    def restart(self) -> None: ...

    def __len__(self) -> int:
        """Return the number of this process's batches in an epoch."""
        ...


# Packages whose datasets and loaders give each process its own part.
_SPLITTING_PACKAGES = {"litdata", "streaming", "webdataset", "wids"}


def is_split_already(loader: Any) -> bool:
    """Return True if a loader already reads different data on each process.

    All processes must call this, because they compare their tables of the package `datasets`.
    """
    dataset = getattr(loader, "dataset", loader)
    packages = {kind.__module__.partition(".")[0] for each in (loader, dataset) for kind in type(each).__mro__}
    # `split_dataset_by_node` leaves no public trace (datasets 4.0).
    hidden = vars(dataset) if "datasets" in packages else {}
    part, fingerprint = hidden.get("_distributed"), hidden.get("_fingerprint")
    is_split = bool(packages & _SPLITTING_PACKAGES) or getattr(part, "world_size", 1) > 1
    if fingerprint is not None and not is_split and several_processes():
        is_split = len(set(gather_object([fingerprint]))) > 1
    if is_split:
        logger.info_once("A %s gives each process its own part, which is not sharded again.", type(dataset).__name__)
    return is_split


def up_to(items: Iterator[Item], limit: int | None, skipped: int = 0) -> Iterator[Item]:
    return items if limit is None else islice(items, max(0, limit - skipped))


def begun(items: Iterator[Item]) -> tuple[list[Item], Iterator[Item]]:
    # The iterator must keep no reference to items that it has yielded.
    first = list(islice(items, 1))

    def everything() -> Iterator[Item]:
        while first:
            yield first.pop()
        yield from items

    return first, everything()


def smallest_known(*lengths: int | None) -> int | None:
    return min((length for length in lengths if length is not None), default=None)


def last_rows(loader: Any) -> int | None:
    """Return the number of rows of a loader's last batch, or None if unknown."""
    if isinstance(loader, (list, tuple)):
        return batch_size_or_none(loader[-1]) if loader else None
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, (list, tuple)):
        return len(batches[-1]) if batches else None
    if type(batches) is not BatchSampler or batches.drop_last:
        return None
    try:
        # The sampler of an iterable dataset has no end.
        samples: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else batches.sampler
        # A full batch if the number of samples is a multiple of the batch size.
        return (len(samples) - 1) % batches.batch_size + 1 if len(samples) else None
    except (TypeError, NotImplementedError):
        return None


def do_nothing() -> None: ...


def rebuilt(loader: DataLoader[Any], dataset: Any, **changes: Any) -> DataLoader[Any]:
    """Create a DataLoader that reads `dataset` and takes all other options, except `changes`, from `loader`."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
        "in_order": loader.in_order,
    }
    # A DataLoader without workers refuses a prefetch_factor.
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(dataset, **{**options, **changes})


def count_rows(pairs: Iterator[tuple[Any, BatchInfo]], alone: bool) -> Iterator[tuple[Any, BatchInfo]]:

    def find(pair: tuple[Any, BatchInfo]) -> tuple[Any, BatchInfo]:
        batch, info = pair
        is_padding = info.is_padding
        info.rows = batch_size_or_none(batch)
        if is_padding:
            # A padding batch without countable rows counts as one row.
            info.rows = info.padding = info.rows or 1
        info.global_rows = info.rows if alone else None
        return pair

    return map(find, pairs)
