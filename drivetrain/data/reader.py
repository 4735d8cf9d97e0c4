"""What all ways of reading a loader have in common."""

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
from drivetrain.runtime.nested import batch_size_or_none
from drivetrain.runtime.seeds import EpochStart, several_processes

logger = get_logger(__name__)

Item = TypeVar("Item")


class Opened(NamedTuple):
    """One iteration over a loader.

    Attributes:
        pairs: This process's batches, each with what is known about it.
        start: The random state that the epoch's order is drawn from.
        close: Called when the iteration is over or left.
        own_state: Returns what the user's loader has saved of itself after so many of its batches, or None if that is
            unknown; None stands for the end of the epoch. None for loaders that keep no state.
        head: The epoch's first batches, which padding is made of, each with its rows, where the iteration begins after
            them. It is filled when the first pair is read.
    """

    pairs: Iterator[tuple[Any, BatchInfo]]
    start: EpochStart
    close: Callable[[], None]
    own_state: Callable[[int | None], Mapping[str, Any] | None] | None = None
    head: Sequence[tuple[Any, int | None]] = ()


class Reader(Protocol):
    """One way of reading this process's share of a loader.

    Attributes:
        layout: How batches are shared; may be changed between iterations.
        finds_rows: Whether the rows of a batch are known only once it is read, and then to this process only.
    """

    layout: Layout
    finds_rows: bool

    @property
    def ends_alike(self) -> bool:
        """Whether processes whose loaders have the same length surely have as many batches."""
        ...

    @property
    def reads_ahead(self) -> bool:
        """Whether a batch may be read before the one before it is computed on, and nothing shows it.

        So it is where workers read, who read ahead anyway, and where the order was drawn before.
        """
        ...

    def open(self, epoch: int, position: Position, limit: int | None = None) -> Opened:
        """Begin an iteration over an epoch, at a position of it."""
        ...

    def restart(self) -> None:
        """Let the next iteration be as the first one: with new workers, where these stay."""
        ...

    def __len__(self) -> int:
        """How many batches this process gets in an epoch."""
        ...


# Whose datasets and loaders give each process its own part.
_SPLITTING_PACKAGES = {"litdata", "streaming", "webdataset", "wids"}


def is_split_already(loader: Any) -> bool:
    """Return whether each process reads its own part of a loader's data, which must not be shared out again.

    Call it on all processes: they compare their tables of the package `datasets`.

    Args:
        loader: The user's loader.
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
        logger.info_once("A %s gives each process its own part, which is not shared out again.", type(dataset).__name__)
    return is_split


def up_to(items: Iterator[Item], limit: int | None, skipped: int = 0) -> Iterator[Item]:
    """The items before a limit, of which `skipped` came before them; nothing is read beyond."""
    return items if limit is None else islice(items, max(0, limit - skipped))


def begun(items: Iterator[Item]) -> tuple[list[Item], Iterator[Item]]:
    """Read the first item. Returns a list of it, or none, and an iterator over all that keeps none that it gave."""
    first = list(islice(items, 1))

    def everything() -> Iterator[Item]:
        while first:
            yield first.pop()
        yield from items

    return first, everything()


def least(*lengths: int | None) -> int | None:
    """The smallest of some lengths, of which those that are None are unknown."""
    return min((length for length in lengths if length is not None), default=None)


def last_rows(loader: Any) -> int | None:
    """Return the rows of the last batch of a loader or list of batches; None if no length or list has that number."""
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
        return (len(samples) - 1) % batches.batch_size + 1 if len(samples) else None
    except (TypeError, NotImplementedError):
        return None


def do_nothing() -> None:
    """For iterations that leave nothing to be closed."""


def rebuilt(loader: DataLoader[Any], dataset: Any, **changes: Any) -> DataLoader[Any]:
    """A loader over `dataset` with the user's options for workers and memory, and these changes."""
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
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(dataset, **{**options, **changes})


def with_rows_found(pairs: Iterator[tuple[Any, BatchInfo]], alone: bool) -> Iterator[tuple[Any, BatchInfo]]:
    """Take the number of rows from each batch, where it does not follow from the order of the indices.

    A batch of padding whose rows cannot be found counts as one row.
    """

    def find(pair: tuple[Any, BatchInfo]) -> tuple[Any, BatchInfo]:
        batch, info = pair
        is_padding = info.is_padding
        info.rows = batch_size_or_none(batch)
        if is_padding:
            info.rows = info.padding = info.rows or 1
        info.global_rows = info.rows if alone else None
        return pair

    return map(find, pairs)
