"""`CombinedLoader`, which iterates several loaders as one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.loader import PreparedLoader
from drivetrain.data.placement import PendingBatch, PendingParts
from drivetrain.data.reader import rebuilt, smallest_known, up_to
from drivetrain.data.sharding import with_last
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DataError, deprecated, nearest
from drivetrain.runtime.pytrees import honor_type

_Known = list[BatchInfo | None]  # for each loader of a combined batch
_Pairs = Generator[tuple[Any, _Known], None, None]
MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


class CombinedLoader:
    """Loader that iterates several loaders together or one after the other, and combines their batches.

    Args:
        iterables: A list, tuple, named tuple or dict of loaders, or of nested structures of them. A single loader, or a
            list of numbers or strings, counts as one loader.
        mode: `"min_size"` ends with the shortest loader. `"max_size_cycle"` restarts shorter loaders until the longest
            ends. `"max_size"` gives None for loaders that have ended. `"sequential"` iterates the loaders one after the
            other.

    Raises:
        ConfigurationError: If the mode is unknown or there are no loaders.

    Example:
        ```python
        import torch
        from drivetrain import CombinedLoader

        few = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
        many = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
        assert len(list(CombinedLoader({"few": few, "many": many}, mode="min_size"))) == 2
        ```
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise ConfigurationError(
                f"Unsupported mode {mode!r}. Use one of {', '.join(MODES)}.{nearest(str(mode), MODES)}"
            )
        self.iterables = iterables
        self.mode = mode
        self.loaders: list[Any] = list(_loaders_in(iterables))
        if not self.loaders:
            raise ConfigurationError("CombinedLoader needs at least one loader.")
        self.current: BatchInfo | None = None
        self._ended = [False] * len(self.loaders)
        self._epoch: int | None = 0
        self._begun = self._has_passed = False
        self._resumes = False
        self._index = 0
        self._limit: int | None = None
        self._together = self._pends = False
        self._cycles: int | None = None

    def map(self, prepare: Callable[[Any], Any]) -> CombinedLoader:
        """Return a `CombinedLoader` in which `prepare(loader)` replaces each loader.

        Args:
            prepare: Called with one loader.
        """
        prepared = [prepare(loader) for loader in self.loaders]
        return CombinedLoader(self.in_structure(prepared), self.mode)

    def shared_by(self, processes: int) -> CombinedLoader:
        """Return a loader that several processes can share: this one, or a copy whose loaders are equally long.

        Each process gets its own batches of every loader. Their combinations match those of a single process only if
        all loaders are equally long. Shorter loaders are therefore repeated, and longer ones cut, before they are
        sharded.

        Args:
            processes: Number of processes that share the loaders.
        """
        lengths = [_length_of(loader) for loader in self.loaders]
        known = [length for length in lengths if length]
        cuts = self.mode in ("min_size", "max_size_cycle") and len(known) == len(lengths) and len(set(known)) > 1
        if not cuts or processes == 1 or all(length % processes == 0 for length in known):
            return self
        count = min(known) if self.mode == "min_size" else max(known)
        loaders = [
            loader
            if len(loader) == count
            else rebuilt(loader, loader.dataset, batch_sampler=CountedBatches(loader, count))
            for loader in self.loaders
        ]
        return CombinedLoader(self.in_structure(loaders), self.mode)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch in all combined loaders, unless a position within the epoch was loaded from a checkpoint.

        Args:
            epoch: Number of the epoch, from 0.
        """
        if self._resumes and epoch == self._epoch:
            return
        self._epoch, self._has_passed, self._resumes = epoch, False, False
        for loader in self.loaders:
            if hasattr(loader, "skip"):
                loader.skip(0)
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.loaders]
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self, limit: float | None = None, together: bool = False) -> Iterator[Any]:
        """Return an iterator over the combined batches of the epoch, which ends after `limit` batches.

        Args:
            limit: Number of combined batches, counted from the start of the epoch, after which the iteration ends.
            together: All processes iterate with equally many batches; see `PreparedLoader.iterate`.
        """
        return self._begin(limit, together, pend=False)

    def iterate_pending(self, limit: float | None = None, together: bool = False) -> Iterator[Any]:
        return self._begin(limit, together, pend=True)

    def _begin(self, limit: float | None, together: bool, pend: bool) -> Iterator[Any]:
        if not self._resumes:
            self._ended = [False] * len(self.loaders)
            self._index = 0
            if self._has_passed and self._epoch is not None:
                self._epoch += 1
        self._has_passed = True
        self._resumes = False
        self._begun = True
        self._limit = None if limit is None or limit == float("inf") else int(limit)
        self._together, self._pends = together, pend
        try:
            length: int | None = len(self)
        except (TypeError, NotImplementedError):
            length = None
        self._cycles = length if self.mode == "max_size_cycle" else None
        is_sequential = self.mode == "sequential"
        batches = self._one_after_the_other() if is_sequential else self._side_by_side(self.begin_together())
        return self._recorded(batches, smallest_known(length, self._limit))

    def _recorded(self, batches: _Pairs, length: int | None) -> Iterator[Any]:
        before = self._index
        held: list[Any] = []  # empty while suspended, so that a batch is freed with its step
        try:
            for batch, known, last in _with_last(up_to(batches, self._limit, before), before, length):
                self.current = info = _combined_info(known, self._index, last)
                held.append(self._as_pending(batch, info) if self._pends else batch)
                del batch
                self._index += 1
                yield held.pop()
            self._begun = False
            for loader in self.loaders:
                # A loader that was not iterated must not resume within the epoch that has ended.
                if isinstance(loader, PreparedLoader):
                    loader.leave_epoch()
        finally:
            self.current = None
            batches.close()

    def _as_pending(self, batch: Any, info: BatchInfo) -> PendingBatch:
        if self.mode != "sequential":
            return PendingParts(batch, info, self.in_structure)
        if not isinstance(batch, PendingBatch):
            return PendingBatch(batch, info)
        batch.info = info
        return batch

    @deprecated(since="0.1.0", removed_in="0.3.0", use="preserve_state")
    def undone(self) -> AbstractContextManager[None]:
        """Return a context manager that restores the loaders' state at its end. Deprecated: use `preserve_state`."""
        return self.preserve_state()

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Return a context manager that restores the positions and random generators of all loaders when it exits.

        See `PreparedLoader.preserve_state`.
        """
        before = list(self._ended), self._begun, self._resumes, self._index, self._epoch, self._has_passed
        try:
            with ExitStack() as stack:
                for loader in self.loaders:
                    stack.enter_context(loader.preserve_state())
                yield
        finally:
            self._ended, self._begun, self._resumes, self._index, self._epoch, self._has_passed = before

    @property
    def keeps_position(self) -> bool:
        return all(hasattr(each, "state_dict") and hasattr(each, "load_state_dict") for each in self.loaders)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all combined loaders, to be saved in a checkpoint."""
        within = self._begun or self._resumes
        # Between two epochs, the state is that of the start of the next one.
        next_one = int(not within and self._has_passed)
        return {
            "epoch": None if self._epoch is None else self._epoch + next_one,
            "index": self._index if within else 0,
            "ended": list(self._ended) if within else [False] * len(self.loaders),
            "loaders": [loader.state_dict() if hasattr(loader, "state_dict") else {} for loader in self.loaders],
        }

    @property
    def reached(self) -> BatchInfo | None:
        return self.current

    def state_after(self, reached: BatchInfo | None) -> dict[str, Any]:
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of the combined loaders from a checkpoint, so that the next iteration continues there.

        Args:
            state: Dict from `state_dict`.

        Raises:
            CheckpointError: If the state is that of another number of loaders.
        """
        if len(state["loaders"]) != len(self.loaders):
            raise CheckpointError(
                f"The state has {len(state['loaders'])} combined loaders, but this loader has {len(self.loaders)}."
            )
        self._index, self._ended = int(state["index"]), [bool(ended) for ended in state["ended"]]
        self._resumes = self._index > 0
        self._epoch, self._has_passed = state.get("epoch"), False
        for loader, saved in zip(self.loaders, state["loaders"], strict=True):
            # A loader that cannot save its position has an empty state.
            if saved:
                loader.load_state_dict(saved)

    def _one_after_the_other(self) -> _Pairs:
        for position, loader in enumerate(self.loaders):
            if self._ended[position]:
                continue
            yield from map(partial(_with_known, loader), self.begin(loader))
            self._ended[position] = True

    def begin_together(self) -> list[Any]:
        # None starts a loader when its first batch is needed. A subclass may begin all of them here, so that each
        # loader draws its order at once.
        return [None] * len(self.loaders)

    def _side_by_side(self, iterators: list[Any]) -> _Pairs:
        try:
            yield from iter(lambda: self._next_row(iterators), None)
        finally:
            # Otherwise loaders would count as active until their iterators are garbage-collected.
            for iterator in iterators:
                if hasattr(iterator, "close"):
                    iterator.close()

    def _next_row(self, iterators: list[Any]) -> tuple[Any, _Known] | None:
        ended = self._ended
        if self._index == self._cycles:  # the longest loader is exhausted: end it, and restart no other one
            for position, iterator in enumerate(iterators):
                if iterator is not None and not ended[position]:
                    next(iterator, None)
                    ended[position] = True
            return None
        batches: list[Any] = []
        for position, loader in enumerate(self.loaders):
            batch, over = self._next(iterators, position, loader, ended)
            if over:
                return None
            batches.append(batch)
        if all(ended):
            return None
        known = [
            _current(loader)
            for loader, over in zip(self.loaders, ended, strict=True)
            if not over or self.mode == "max_size_cycle"
        ]
        if self.mode == "max_size":  # parts that are all padding become None, unless all parts are
            is_real = [
                batch is not None and not _is_padding(loader)
                for batch, loader in zip(batches, self.loaders, strict=True)
            ]
            if any(is_real):
                batches = [batch if real else None for batch, real in zip(batches, is_real, strict=True)]
        return batches if self._pends else self.in_structure(batches), known

    def _next(self, iterators: list[Any], position: int, loader: Any, ended: list[bool]) -> tuple[Any, bool]:
        try:
            if self.mode == "max_size" and ended[position]:
                return None, False
            if iterators[position] is None:
                iterators[position] = self.begin(loader)
            return next(iterators[position]), False
        except StopIteration:
            ended[position] = True
        if self.mode == "min_size":
            return None, True
        if self.mode == "max_size" or all(ended):
            return None, all(ended)
        # In the mode max_size_cycle, an exhausted loader starts again.
        iterators[position] = self.begin(loader)
        try:
            return next(iterators[position]), False
        except StopIteration:
            raise DataError(f"Loader {position} of a CombinedLoader is empty, so it cannot be restarted.") from None

    def begin(self, loader: Any) -> Iterator[Any]:
        if not isinstance(loader, PreparedLoader):
            return iter(loader)
        limit = self._limit
        if limit is not None:
            # Convert the limit of combined batches to this loader's own count.
            limit += (loader.consumed_batches if loader.resumes else 0) - self._index
        return (loader.iterate_pending if self._pends else loader.iterate)(limit, self._together)

    def in_structure(self, batches: list[Any]) -> Any:
        return _rearranged(self.iterables, iter(batches))


class CountedBatches(Sampler[Any]):
    def __init__(self, loader: DataLoader[Any], count: int) -> None:
        self.batches: Any = loader.batch_sampler
        self.count, self.generator = count, loader.generator

    def __iter__(self) -> Iterator[Any]:
        left = self.count
        while left:
            before = left
            if left < self.count:  # torch's DataLoader draws a seed for its workers at the start of each pass
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            for batch in islice(iter(self.batches), left):
                left -= 1
                yield batch
            if left == before:
                raise DataError("A loader of a CombinedLoader is empty, so it cannot be restarted.")

    def __len__(self) -> int:
        return self.count

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # not set yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.batches, name)


def _length_of(loader: Any) -> int | None:
    is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not is_map_style or isinstance(loader, PreparedLoader) or loader.batch_sampler is None:
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _loaders_in(structure: Any, outermost: bool = True) -> Iterator[Any]:
    if not is_structure(structure, outermost):
        yield structure
        return
    for each in structure.values() if isinstance(structure, Mapping) else structure:
        yield from _loaders_in(each, outermost=False)


def _rearranged(structure: Any, batches: Iterator[Any], outermost: bool = True) -> Any:
    if not is_structure(structure, outermost):
        return next(batches)
    if isinstance(structure, Mapping):
        return {name: _rearranged(each, batches, outermost=False) for name, each in structure.items()}
    arranged = [_rearranged(each, batches, outermost=False) for each in structure]
    return honor_type(structure, arranged) if isinstance(structure, tuple) else arranged


def is_structure(value: Any, outermost: bool = True) -> bool:
    if not isinstance(value, Mapping | list | tuple):
        return False
    held = list(value.values()) if isinstance(value, Mapping) else list(value)
    # A list of numbers or strings is data of a single loader.
    if held and all(isinstance(each, int | float | str) for each in held):
        return False
    return outermost or (bool(held) and all(_is_loader(each) or is_structure(each, outermost=False) for each in held))


def _is_loader(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(each, int | float | str) for each in value)
    # Dicts, strings and arrays can be iterated too, but they are batches.
    is_batch = isinstance(value, Mapping | str) or hasattr(value, "__array__")
    return hasattr(value, "__iter__") and not is_batch


def _with_last(
    pairs: Iterator[tuple[Any, _Known]], index: int, length: int | None
) -> Iterator[tuple[Any, _Known, bool]]:
    if length is not None:
        return map(lambda pair, number: (*pair, number == length), pairs, count(index + 1))
    return map(_flat, with_last(pairs))


def _flat(given: tuple[tuple[Any, _Known], bool]) -> tuple[Any, _Known, bool]:
    (batch, known), last = given
    return batch, known, last


def _with_known(loader: Any, batch: Any) -> tuple[Any, _Known]:
    return batch, [_current(loader)]


def _is_padding(loader: Any) -> bool:
    info = _current(loader)
    return info is not None and info.is_padding


def _current(loader: Any) -> BatchInfo | None:
    info = getattr(loader, "current", None)
    return info if isinstance(info, BatchInfo) else None


def _combined_info(known: _Known, index: int, last: bool) -> BatchInfo:
    parts = [info for info in known if info is not None]
    # Loaders that are not prepared record nothing about their batches.
    if len(parts) < len(known) or not parts:
        return BatchInfo(index, None, 0, None, last, None)
    first = parts[0]
    if all(
        (info.rows, info.padding, info.global_rows, info.weights)
        == (first.rows, first.padding, first.global_rows, first.weights)
        for info in parts
    ):
        return BatchInfo(index, first.rows, first.padding, first.global_rows, last, None, first.weights)
    counts = [info.weights or (info.real_rows, info.global_rows) for info in parts]
    # If parts differ in size, or only some are padding, the total rows of all parts are the weights.
    own, total = [mine for mine, _ in counts], [everyone for _, everyone in counts]
    weights = None if None in own or None in total else (sum(filter(None, own)), sum(filter(None, total)))
    if all(info.is_padding for info in parts):
        rows = sum(info.padding for info in parts)
        return BatchInfo(index, rows, rows, None, last, None, weights)
    sizes = {info.rows for info in parts}
    return BatchInfo(index, sizes.pop() if len(sizes) == 1 else None, 0, None, last, None, weights)
