"""`PreparedLoader`: a user's loader in its own order, sharded over processes, with batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from drivetrain.data.batch_info import ActiveLoaders, BatchInfo
from drivetrain.data.configuration import TailPolicy
from drivetrain.data.order import Position, SeedableSampler
from drivetrain.data.placement import PendingBatch, Place, one_ahead, pending, sends_ahead
from drivetrain.data.reader import Opened, Reader
from drivetrain.data.sharding import Layout, check_common_end, pad_short_batches, with_rows_of_all
from drivetrain.runtime import observer
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, deprecated
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import (
    EpochStart,
    find_generators,
    generator_state,
    kept_generators,
    set_generator_state,
    several_processes,
)
from drivetrain.runtime.state import PartialState

logger = get_logger(__name__)


class PreparedLoader(DataLoader[Any]):
    """Loader that gives this process its share of a user's loader.

    The batches of all processes, ordered by step and rank, are those of the user's loader in a single process. All
    other attributes are those of the user's loader, such as `dataset`, `batch_size`, `sampler`, `num_workers` and
    `drop_last`. It is an instance of `torch.utils.data.DataLoader`. It can be copied and pickled at any time, and
    copies iterate independently.

    Attributes:
        loader: The user's loader.
        current: `BatchInfo` of the latest batch, or None outside of a loop.
        active: List of the loaders that are being iterated.
        advanced: Tick of `active` at which the latest batch was handed out.
        stateful: True if `Accelerator.load_state` continues at the saved position, and False if at the start of that
            epoch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        reader: Reader,
        layout: Layout,
        place: Place | None,
        active: ActiveLoaders,
        seedable: SeedableSampler | None = None,
        fill: bool = False,
        stateful: bool = False,
        recipe: Callable[[Iterable[Any]], PreparedLoader] | None = None,
    ) -> None:
        # Without DataLoader.__init__: dataset, sampler and workers are those of the wrapped loader.
        self.loader = loader
        self.stateful = stateful
        self.active = active
        self.current: BatchInfo | None = None
        self.advanced = 0
        self._reader = reader
        self._layout, self._group_size = layout, layout.group_size
        self._recipe = recipe
        self._place = place
        self._seedable = seedable
        self._fill = fill
        self._epoch = 0
        self._begun = False  # True if `_epoch` was iterated, wholly or in part
        self._exhausted = False
        self._reached: BatchInfo | None = None  # the last batch of an iteration that was left early
        self._resume: Position | None = None
        self._after_last: Position | None = None  # start of the next epoch, if the loaded position ends an epoch
        self._expects_next = False  # True to begin at `_after_last`, unless the script stays in the epoch
        self._start: EpochStart | None = None
        self._own_state: Callable[[int | None], Mapping[str, Any] | None] | None = None
        self._offset = 0  # batches before the first step that do not make up a whole step
        self._forwarded: list[tuple[Any, int]] = []  # the epochs passed to the samplers
        self._forwarded_epoch: int | None = None

    if not TYPE_CHECKING:
        __setattr__ = object.__setattr__  # DataLoader's own refuses attributes that belong to the wrapped loader

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        return self.loader.multiprocessing_context  # type: ignore[attr-defined]

    # iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.iterate()

    def iterate(self, limit: float | None = None, together: bool = False) -> Iterator[Any]:
        """Return an iterator over this process's batches, which ends after `limit` batches of the epoch.

        Args:
            limit: Number of this process's batches, counted from the start of the epoch, after which the iteration
                ends. Nothing more is drawn from the sampler then, as after a `break` in a plain loop.
            together: All processes iterate with equally many batches. They exchange what only single processes
                have: rows of batches that are read whole (`batch_size=None`), and the end of streams.

        Returns:
            The iterator.

        Raises:
            DataError: While iterating with `together`, if some processes run out of batches before others.
        """
        batches = self._begin(limit, together, pend=self._place is not None)
        return batches if self._place is None else _placed(batches)

    def iterate_pending(self, limit: float | None = None, together: bool = False) -> Iterator[PendingBatch]:
        return self._begin(limit, together, pend=True)

    def _begin(self, limit: float | None, together: bool, pend: bool) -> Iterator[Any]:
        self._begin_epoch()
        position = self._resume or Position()
        self._resume = self._reached = self._after_last = None
        self._exhausted = False
        self._offset = position.batches % self._group_size
        opened = self._reader.open(self._epoch, position, self._user_batches(limit))
        if together and several_processes():
            pairs = opened.pairs
            if not self._reader.ends_alike:
                pairs = check_common_end(pairs)
            if self._reader.finds_rows and self._layout.shard.count > 1:
                pairs = with_rows_of_all(pairs, self._layout.shard.count)
            opened = opened._replace(pairs=pairs)
        if self._fill:
            opened = opened._replace(pairs=pad_short_batches(opened.pairs, getattr(self.loader, "batch_size", None)))
        if observer.current is not None:
            opened = opened._replace(pairs=observer.current.batches(self, opened.pairs))
        self._start, self._own_state = opened.start, opened.own_state
        return self._batches(opened, pend)

    def end_workers(self) -> None:
        """Stop the loader's persistent worker processes."""
        self._reader.restart()

    @deprecated(since="0.1.0", removed_in="0.3.0", use="preserve_state")
    def undone(self) -> AbstractContextManager[None]:
        """Restore the loader's position when the returned context manager exits. Deprecated: use `preserve_state`."""
        return self.preserve_state()

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Restore the loader's position and random generators when the `with` block ends.

        The generators held by the loader, its samplers and its dataset are restored, and persistent workers are
        stopped. The global generators and other state of the dataset are not restored.
        """
        names = (
            "_epoch",
            "_begun",
            "_exhausted",
            "_reached",
            "_resume",
            "_after_last",
            "_expects_next",
            "_start",
            "_own_state",
            "_offset",
        )
        before = [getattr(self, name) for name in names]
        with kept_generators(self.loader, getattr(self.loader, "dataset", None)):
            try:
                yield
            finally:
                for name, value in zip(names, before, strict=True):
                    setattr(self, name, value)
                self._reader.restart()

    def _user_batches(self, limit: float | None) -> int | None:
        if limit is None or limit == float("inf"):
            return None
        # The limit counts this process's batches.
        batches = int(limit) * self._reader.layout.group_size
        try:
            if batches >= len(self.loader):  # type: ignore[arg-type]
                return None  # the sampler must be exhausted, as in a plain loop
        except (TypeError, NotImplementedError):
            pass
        return batches

    def _batches(self, opened: Opened, pend: bool) -> Iterator[Any]:
        place, tick = self._place, PartialState().heartbeat.beating(self.active.tick)
        batches: Iterator[PendingBatch] = iter(())
        pairs: Iterator[tuple[Any, BatchInfo]] = iter(())
        if pend:
            batches = pending(opened.pairs, place)
            # An observer sees batches in the steps that use them.
            if sends_ahead(place) and self._reader.reads_ahead and observer.current is None:
                batches = one_ahead(batches)
        else:
            pairs = opened.pairs
        # Empty while this generator is suspended, so that a batch is freed with its step.
        held: list[Any] = []
        self.active.enter(self)
        try:
            # Two loops, so that batches that stay on the host need no PendingBatch.
            for pended in batches:
                self.current = pended.info
                self.advanced = tick()
                held.append(pended)
                del pended
                yield held.pop()
            for batch, self.current in pairs:
                held.append(batch)
                del batch
                self.advanced = tick()
                yield held.pop()
            self._exhausted = True
        finally:
            self._reached, self.current = self.current, None
            self.active.leave(self)
            opened.close()

    def __len__(self) -> int:
        """Return the number of this process's batches in an epoch."""
        return len(self._reader)

    @property
    def remaining(self) -> int | None:
        """Number of batches left in the epoch, including the current batch, or None if unknown."""
        info = self.current
        if info is not None and info.last:
            return 1
        try:
            batches = len(self._reader)
        except (TypeError, NotImplementedError):
            return None
        # At least 2, because the current batch is not the last one.
        return batches if info is None else max(2, batches - info.index)

    @property
    def tail(self) -> TailPolicy:
        """Policy that determines what happens at the end of an epoch if only some processes get a batch."""
        return self._layout.tail

    @tail.setter
    def tail(self, tail: TailPolicy) -> None:
        self._layout = self._layout._replace(tail=TailPolicy(tail))
        self._reader.layout = self._reader.layout._replace(tail=TailPolicy(tail))

    @property
    def ends_as_its_stream(self) -> bool:
        return isinstance(getattr(self.loader, "dataset", None), IterableDataset)

    # epochs

    @property
    def epoch(self) -> int:
        """Number of the current epoch, counted from 0.

        After `set_epoch` and before the first iteration, it is that of the next epoch.
        """
        return self._epoch + self._expects_next

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next iteration reads, for this loader, its dataset and its samplers.

        Without this call, each iteration is the next epoch. A loaded position in another epoch is discarded.

        Args:
            epoch: Number of the epoch, from 0.
        """
        if epoch == self._epoch:
            self.stay_in_epoch()
        elif self._after_last is not None and epoch == self._epoch + 1:
            self._go_to_next_epoch()
        else:
            self._resume, self._expects_next = None, False
        self._epoch, self._begun = epoch, False
        self._exhausted, self._reached = False, None  # they belong to another epoch
        self._forward_epoch()

    def _begin_epoch(self) -> None:
        if self._expects_next:
            self._go_to_next_epoch()
            if self.stateful:
                logger.warning_once(
                    "The checkpoint was saved after the last batch of epoch %d, so the loader continues with epoch %d, "
                    "as in Accelerate. A loop that starts at epoch %d would train one epoch too many. Start the loop "
                    "at loader.epoch, or call loader.set_epoch(epoch) before each epoch.",
                    self._epoch - 1,
                    self._epoch,
                    self._epoch - 1,
                )
        if self._begun:
            self._epoch += 1
        # If the user has set the sampler's epoch, it applies to this loader too.
        for target, given in self._forwarded or [(target, -1) for target in self._epoch_targets()[1:]]:
            epoch = getattr(target, "epoch", None)
            if type(epoch) is int and epoch != given and (given >= 0 or self._epoch == 0):
                self._epoch = epoch
        self._begun = True
        if self._epoch != self._forwarded_epoch:
            self._forward_epoch()
        if self._seedable is not None:
            self._seedable.set_epoch(self._epoch)

    def _go_to_next_epoch(self) -> None:
        self._resume = self._after_last if self._after_last is not None and self._after_last.own else None
        self._epoch, self._after_last, self._expects_next = self._epoch + 1, None, False

    def _epoch_targets(self) -> list[Any]:
        owners = [getattr(self.loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        owners.append(getattr(owners[2], "sampler", None))
        targets = [owner if callable(getattr(owner, "set_epoch", None)) else None for owner in owners]
        # The first item is the dataset, or None.
        found: list[Any] = targets[:1]
        for target in targets[1:]:
            if target is not None and not any(target is each for each in found):
                found.append(target)
        return found

    def _forward_epoch(self) -> None:
        targets = self._epoch_targets()
        for target in targets:
            if target is not None:
                target.set_epoch(self._epoch)
        self._forwarded, self._forwarded_epoch = [(target, self._epoch) for target in targets[1:]], self._epoch

    # position

    @property
    def reached_end(self) -> bool:
        """True if the last batch of the epoch has been yielded."""
        reached = self.reached
        return self._exhausted or (reached is not None and reached.last)

    @property
    def resumes(self) -> bool:
        return self._resume is not None

    @property
    def resumes_within(self) -> bool:
        if self._resume is None or self._expects_next:
            return False
        return bool(self._resume.batches or self._resume.samples)

    def skip(self, num_batches: int, in_loaded_order: bool = False) -> None:
        """Skip the first `num_batches` batches of this process in the next iteration, as a resumed run does.

        Skipped samples of a map-style dataset are not read.

        Args:
            num_batches: Number of batches to skip, from 0.
            in_loaded_order: Keep the order of an epoch whose position was loaded, instead of drawing a new one.
        """
        if num_batches:
            self.stay_in_epoch()
        self._after_last = None
        start = self._resume.start if in_loaded_order and self._resume is not None else None
        self._resume = Position(batches=checked_count(num_batches) * self._group_size, start=start)

    def expect_next_epoch(self) -> None:
        # No effect if `set_epoch` or `skip` is called for the finished epoch first: then the script counts epochs, and
        # is still in it.
        self._expects_next = self._after_last is not None

    def stay_in_epoch(self) -> None:
        # For scripts that skip batches by themselves, even if the loaded epoch has none left.
        self._expects_next = False

    def leave_epoch(self) -> None:
        if self.resumes_within:
            self._resume, self._begun = None, True

    def rewind(self) -> None:
        # The epoch starts again, in the order that was saved.
        if self._resume is not None and (self._resume.start or self._resume.batches):
            self._resume = None if self._resume.start is None else Position(start=self._resume.start)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, to be stored in a checkpoint.

        Returns:
            A dict of numbers, strings, tensors, and lists and dicts of these. It can be loaded with any number of
            processes and workers. Samples are counted over all processes.
        """
        return self.state_after(self.reached)

    @property
    def reached(self) -> BatchInfo | None:
        return self.current or self._reached

    def state_after(self, reached: BatchInfo | None) -> dict[str, Any]:
        """Return the loader's position after the batch `reached` as a dict, from which a resumed run continues.

        Batches that were only read ahead do not count.

        Args:
            reached: `BatchInfo` of the batch, or None for the position before the first one.

        Returns:
            A dict like that of `state_dict`.
        """
        own, finished = self._own_state, reached is not None and reached.last
        state: dict[str, Any] = {
            "epoch": self._epoch + (self._begun and self._exhausted),
            "consumed": 0,
            "batches": 0,
            "start": None,
            "finished": False,
            "own": own(None) if own is not None and (self._exhausted or finished) else None,
            "group": self._group_size,
            "process": self._own_process(),
            "generators": [generator_state(each) for each in find_generators(self.loader)],
        }
        if self._resume is not None:
            # A loaded position that has not been used yet is saved unchanged.
            samples, start = self._resume.samples, self._resume.start
            state.update(consumed=samples, batches=self._resume.batches, start=start and start.state_dict())
            state.update(finished=self._after_last is not None, own=self._resume.own)
        elif self._begun and not self._exhausted and self._start is not None:
            # Counted in the user's batches, so that the number of processes may change.
            batches = 0 if reached is None else (reached.index + 1) * self._group_size + self._offset
            consumed = 0 if reached is None else reached.consumed
            state.update(consumed=consumed, batches=batches, start=self._start.state_dict(), finished=finished)
            state["own"] = own(batches) if own is not None and batches else None
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the loader to a position that `state_dict` has returned. The next iteration continues there.

        Args:
            state: Dict from `state_dict`, from a run with any number of processes and workers.

        Raises:
            CheckpointError: If the dict is not from `state_dict`.
        """
        missing = [name for name in ("epoch", "consumed", "batches", "start", "generators") if name not in state]
        if missing:
            raise CheckpointError(
                f"This loader state has no {', '.join(missing)}. Pass the state_dict() of a prepared loader."
            )
        self.set_epoch(int(state["epoch"]))
        for generator, value in zip(find_generators(self.loader), state["generators"], strict=False):
            set_generator_state(generator, value)
        start = None if state["start"] is None else EpochStart.from_state_dict(state["start"])
        batches = self._batches_before(state["consumed"], int(state["batches"]))
        finished = bool(state.get("finished"))
        # The user's loader can use its own state only if the position is after as many of its batches as before, and
        # if the state is not that of another process's part.
        fits = (finished or batches == int(state["batches"])) and state.get("process") == self._own_process()
        own = state.get("own") if fits else None
        position = Position(batches, state["consumed"], start, own, state.get("group"))
        self._resume = position if position.batches or position.samples or start or own else None
        self._after_last, self._expects_next = Position(own=own) if finished else None, False

    def _own_process(self) -> list[int] | None:
        if self.is_shared or self._layout.shard.is_common or not several_processes():
            return None
        # The saved position is valid on this process only.
        state = PartialState()
        return [state.process_index, state.num_processes]

    def _batches_before(self, samples: int | None, batches: int) -> int:
        # The batch size may have changed since the position was saved.
        size = getattr(self.loader, "batch_size", None)
        sampler = getattr(self.loader, "sampler", None)
        if samples is None or not isinstance(size, int) or isinstance(sampler, DistributedSampler):
            return batches
        # Rounded up, so that a batch that was consumed in part counts too.
        return -(-samples // size)

    @property
    def consumed_batches(self) -> int:
        """Number of batches that this process has consumed in the current epoch.

        Batches that are skipped when an epoch is resumed count as well.
        """
        if self._expects_next:
            return 0
        if self._resume is not None:
            return self._resume.batches // self._group_size
        reached = self.current or self._reached
        return 0 if reached is None or self._exhausted else reached.index + 1

    # properties for scripts

    @property
    def end_of_dataloader(self) -> bool:
        """True if the latest batch is the last one of the epoch. False outside of a loop."""
        return self.current is not None and self.current.last

    @property
    def remainder(self) -> int:
        """Number of samples in the epoch's last global batch, not counting padding, or -1 before the last batch."""
        info = self.current
        return info.global_rows if info is not None and info.last and info.global_rows is not None else -1

    @property
    def is_shared(self) -> bool:
        """True if each process reads only its own part of the loader's data."""
        return self._layout.shard.count > 1

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in a full step of all processes, or None if unknown."""
        sampler = getattr(self.loader, "batch_sampler", None)
        size = getattr(self.loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        return size * self._group_size if isinstance(size, int) else None

    @property
    def batch_rows(self) -> int | None:
        """Number of rows in a full batch of one process, or None if unknown."""
        total = self.total_batch_size
        return None if total is None else total // self._layout.shard.count

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the user's dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # `loader` is not set while a copy is being made, and looking it up here would recurse forever.
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._recipe is None:
            raise TypeError("Only a loader from prepare_loader can be copied or pickled.")
        return _again, (self._recipe, self.loader, self.state_dict())

    def __repr__(self) -> str:
        shard = self._layout.shard
        return f"PreparedLoader({type(self.loader).__name__}, part {shard.index} of {shard.count}, epoch {self._epoch})"


def _placed(batches: Iterator[PendingBatch]) -> Iterator[Any]:
    held: list[Any] = []
    try:
        for batch in batches:
            held.append(batch.take())
            del batch
            yield held.pop()
    finally:
        batches.close()  # type: ignore[attr-defined]


def checked_count(num_batches: int) -> int:
    if num_batches < 0:
        raise ConfigurationError(f"The number of batches to skip must not be negative, but got {num_batches}.")
    return num_batches


def _again(recipe: Callable[[Any], PreparedLoader], loader: Any, position: Mapping[str, Any]) -> PreparedLoader:
    prepared = recipe(loader)
    prepared.load_state_dict(position)
    return prepared
