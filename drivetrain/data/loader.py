"""The loader that users iterate: their own order, this process's share, on the device, every row accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from drivetrain.data.batch_info import ActiveLoaders, BatchInfo
from drivetrain.data.configuration import TailPolicy
from drivetrain.data.order import Position, SeedableSampler
from drivetrain.data.placement import PendingBatch, Place, one_ahead, pending, sends_ahead
from drivetrain.data.reader import Opened, Reader
from drivetrain.data.sharding import Layout, ending_together, filled, with_rows_of_all
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
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
    """Iterates this process's share of a user's loader; made by `prepare_loader`.

    Over all processes together, in the order of (step, rank), the batches are those of the user's loader in one plain
    process. Attributes that are not listed here are those of the user's loader: `dataset`, `batch_size`, `sampler`,
    `batch_sampler`, `num_workers`, `collate_fn`, `drop_last` and so on. `isinstance` finds it to be a
    `torch.utils.data.DataLoader`, and it can be copied and pickled at any time; a copy iterates by itself.

    Attributes:
        loader: The user's loader.
        current: What is known about the batch that was handed out last; None outside of a loop.
        active: Where loaders that are being iterated are listed.
        advanced: The time, by the clock of `active`, at which the last batch was handed out.
        stateful: Whether `Accelerator.load_state` lets it begin where it was, rather than at the start of that epoch.
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
        # Not DataLoader.__init__: dataset, sampler and workers are those of the loader inside.
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
        self._begun = False  # whether `_epoch` was iterated, wholly or in part
        self._exhausted = False
        self._reached: BatchInfo | None = None  # the last batch of an iteration that was left early
        self._resume: Position | None = None
        self._after_last: Position | None = None  # the next epoch's start, if the loaded position is after a last batch
        self._expects_next = False  # whether to begin there, unless the script stays in the epoch
        self._start: EpochStart | None = None
        self._own_state: Callable[[int | None], Mapping[str, Any] | None] | None = None
        self._offset = 0  # batches before the first step, beyond a whole number of steps
        self._forwarded: list[tuple[Any, int]] = []  # the epochs that were given to samplers
        self._forwarded_epoch: int | None = None

    if not TYPE_CHECKING:
        __setattr__ = object.__setattr__  # torch's guards attributes that are those of the loader inside

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        """How the workers of the user's loader start."""
        return self.loader.multiprocessing_context  # type: ignore[attr-defined]

    # iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.iterate()

    def iterate(self, limit: float | None = None, together: bool = False) -> Iterator[Any]:
        """Iterate as `iter(loader)` does, and end early or in step with the other processes.

        Args:
            limit: Batches of this process, counted from the start of the epoch, after which the iteration ends. Beyond
                them nothing is drawn from the sampler, as where a plain loop breaks there.
            together: All processes iterate, each with as many batches. What is known to single processes only is
                exchanged: the rows of batches that are read whole (`batch_size=None`), and whether a stream has ended.

        Returns:
            The iterator.

        Raises:
            DataError: While iterating, with `together`: the batches of some processes ended before those of others.
        """
        batches = self._begin(limit, together, pend=self._place is not None)
        return batches if self._place is None else _placed(batches)

    def iterate_pending(self, limit: float | None = None, together: bool = False) -> Iterator[PendingBatch]:
        """The same, of batches that were read and are brought to the device when they are used.

        Args:
            limit: As for `iterate`.
            together: As for `iterate`.

        Returns:
            The iterator.
        """
        return self._begin(limit, together, pend=True)

    def _begin(self, limit: float | None, together: bool, pend: bool) -> Iterator[Any]:
        """Begin an iteration, of pending batches or of those that are read."""
        self._begin_epoch()
        position = self._resume or Position()
        self._resume = self._reached = self._after_last = None
        self._exhausted = False
        self._offset = position.batches % self._group_size
        opened = self._reader.open(self._epoch, position, self._user_batches(limit))
        if together and several_processes():
            pairs = opened.pairs
            if not self._reader.ends_alike:
                pairs = ending_together(pairs)
            if self._reader.finds_rows and self._layout.shard.count > 1:
                pairs = with_rows_of_all(pairs, self._layout.shard.count)
            opened = opened._replace(pairs=pairs)
        if self._fill:
            opened = opened._replace(pairs=filled(opened.pairs, getattr(self.loader, "batch_size", None)))
        self._start, self._own_state = opened.start, opened.own_state
        return self._batches(opened, pend)

    def end_workers(self) -> None:
        """End workers that wait for the next iteration, which then starts new ones."""
        self._reader.restart()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo in the end what the body's iterations did to the loader: it draws next what it would have drawn first.

        Generators that the loader, its samplers and its dataset hold are put back, and workers that stay are ended. The
        global generators are not put back, nor what a dataset remembers otherwise.
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
        """The user's batches that so many of this process's are of; None where these are all that there are."""
        if limit is None or limit == float("inf"):
            return None
        batches = int(limit) * self._reader.layout.group_size
        try:
            if batches >= len(self.loader):  # type: ignore[arg-type]
                return None  # the sampler is then to see its end, as in a plain loop
        except (TypeError, NotImplementedError):
            pass
        return batches

    def _batches(self, opened: Opened, pend: bool) -> Iterator[Any]:
        """The loop that every batch goes through; it holds none while it waits to be asked for the next."""
        place, tick = self._place, PartialState().heartbeat.beating(self.active.tick)
        batches: Iterator[PendingBatch] = iter(())
        pairs: Iterator[tuple[Any, BatchInfo]] = iter(())
        if pend:
            batches = pending(opened.pairs, place)
            if sends_ahead(place) and self._reader.reads_ahead:
                batches = one_ahead(batches)
        else:
            pairs = opened.pairs
        held: list[Any] = []
        self.active.enter(self)
        try:
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
        """Batches of this process in an epoch."""
        return len(self._reader)

    @property
    def remaining(self) -> int | None:
        """Batches of this process that are left in the epoch, the current one included; None if unknown."""
        info = self.current
        if info is not None and info.last:
            return 1
        try:
            batches = len(self._reader)
        except (TypeError, NotImplementedError):
            return None
        return batches if info is None else max(2, batches - info.index)

    @property
    def tail(self) -> TailPolicy:
        """What happens at the end of an epoch; it can be changed between iterations."""
        return self._layout.tail

    @tail.setter
    def tail(self, tail: TailPolicy) -> None:
        self._layout = self._layout._replace(tail=TailPolicy(tail))
        self._reader.layout = self._reader.layout._replace(tail=TailPolicy(tail))

    @property
    def ends_as_its_stream(self) -> bool:
        """Whether the batches are those of an iterable dataset."""
        return isinstance(getattr(self.loader, "dataset", None), IterableDataset)

    # epochs

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way or the last one; before the first, and after `set_epoch`, the next."""
        return self._epoch + self._expects_next

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` that of the next iteration, for the dataset and the samplers too.

        Without a call, each iteration is the next epoch. A position to resume from in another epoch is dropped.

        Args:
            epoch: From 0.
        """
        if epoch == self._epoch:
            self.stay_in_epoch()
        elif self._after_last is not None and epoch == self._epoch + 1:
            self._go_to_next_epoch()
        else:
            self._resume, self._expects_next = None, False
        self._epoch, self._begun = epoch, False
        self._exhausted, self._reached = False, None  # what was read belongs to another epoch
        self._forward_epoch()

    def _begin_epoch(self) -> None:
        """Settle the epoch of the iteration that begins."""
        if self._expects_next:
            self._go_to_next_epoch()
            if self.stateful:
                logger.warning_once(
                    "The checkpoint was saved with the last batch of epoch %d, so this is epoch %d, as in Accelerate. "
                    "A loop that counts epochs itself and still counts epoch %d trains one too many: let it begin at "
                    "loader.epoch, or call loader.set_epoch(epoch) before each epoch.",
                    self._epoch - 1,
                    self._epoch,
                    self._epoch - 1,
                )
        if self._begun:
            self._epoch += 1
        # A user who sets the epoch of the sampler by hand means this loader's too.
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
        """Begin the next iteration with the epoch that follows a loaded position after the last batch."""
        self._resume = self._after_last if self._after_last is not None and self._after_last.own else None
        self._epoch, self._after_last, self._expects_next = self._epoch + 1, None, False

    def _epoch_targets(self) -> list[Any]:
        """The dataset and the samplers, where they take the epoch; the dataset, or None, comes first."""
        owners = [getattr(self.loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        owners.append(getattr(owners[2], "sampler", None))
        targets = [owner if callable(getattr(owner, "set_epoch", None)) else None for owner in owners]
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
        """Whether the last batch of the epoch has been handed out, so that nothing is left to resume in it."""
        reached = self.reached
        return self._exhausted or (reached is not None and reached.last)

    @property
    def resumes(self) -> bool:
        """Whether the next iteration begins at a position that was loaded or skipped to."""
        return self._resume is not None

    @property
    def resumes_within(self) -> bool:
        """Whether that position is not the start of its epoch."""
        if self._resume is None or self._expects_next:
            return False
        return bool(self._resume.batches or self._resume.samples)

    def skip(self, num_batches: int, in_loaded_order: bool = False) -> None:
        """Begin the next iteration, and only this one, after so many of this process's batches.

        Of a map-style dataset nothing is read that is skipped.

        Args:
            num_batches: From 0.
            in_loaded_order: Whether an epoch that was loaded keeps its order, rather than being drawn again.
        """
        if num_batches:
            self.stay_in_epoch()
        self._after_last = None
        start = self._resume.start if in_loaded_order and self._resume is not None else None
        self._resume = Position(batches=checked_count(num_batches) * self._group_size, start=start)

    def expect_next_epoch(self) -> None:
        """Begin the next iteration with the next epoch, if the position that was loaded is after an epoch's last batch.

        This holds unless `set_epoch` or `skip` asks for the rest of the epoch first, of which nothing is left. A
        script that counts batches begins the next epoch there; one that counts epochs is still in the one before.
        """
        self._expects_next = self._after_last is not None

    def stay_in_epoch(self) -> None:
        """Undo `expect_next_epoch`, for a script that skips what it has trained on of the epoch that it is in."""
        self._expects_next = False

    def leave_epoch(self) -> None:
        """Take the epoch that a loaded position is in as over: the next iteration is the next epoch."""
        if self.resumes_within:
            self._resume, self._begun = None, True

    def rewind(self) -> None:
        """Begin the next iteration at the start of the epoch that a loaded position is in, in that epoch's order."""
        if self._resume is not None and (self._resume.start or self._resume.batches):
            self._resume = None if self._resume.start is None else Position(start=self._resume.start)

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, the samples consumed in it by all processes, and what its order is drawn from.

        Returns:
            A dict of numbers, strings, tensors, and lists and dicts of these. It is the same for any number of
            processes and workers.
        """
        return self.state_after(self.reached)

    @property
    def reached(self) -> BatchInfo | None:
        """What is known about the batch handed out last, also once the loop over the loader has been left."""
        return self.current or self._reached

    def state_after(self, reached: BatchInfo | None) -> dict[str, Any]:
        """The position after one of the batches handed out in the epoch under way, as `state_dict` gives it.

        Args:
            reached: What was known about the batch; None for the position before the first.

        Returns:
            As `state_dict`.
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
            "generators": [generator_state(each) for each in find_generators(self.loader)],
        }
        if self._resume is not None:
            samples, start = self._resume.samples, self._resume.start
            state.update(consumed=samples, batches=self._resume.batches, start=start and start.state_dict())
            state.update(finished=self._after_last is not None, own=self._resume.own)
        elif self._begun and not self._exhausted and self._start is not None:
            batches = 0 if reached is None else (reached.index + 1) * self._group_size + self._offset
            consumed = 0 if reached is None else reached.consumed
            state.update(consumed=consumed, batches=batches, start=self._start.state_dict(), finished=finished)
            state["own"] = own(batches) if own is not None and batches else None
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position: the next iteration gives the samples that follow it.

        Args:
            state: From `state_dict`, of a run with any number of processes and workers.

        Raises:
            CheckpointError: If it is no such state.
        """
        missing = [name for name in ("epoch", "consumed", "batches", "start", "generators") if name not in state]
        if missing:
            raise CheckpointError(
                f"This loader state has no {', '.join(missing)}. It must come from state_dict() of a prepared loader."
            )
        self.set_epoch(int(state["epoch"]))
        for generator, value in zip(find_generators(self.loader), state["generators"], strict=False):
            set_generator_state(generator, value)
        start = None if state["start"] is None else EpochStart.from_state_dict(state["start"])
        batches = self._batches_before(state["consumed"], int(state["batches"]))
        finished = bool(state.get("finished"))
        own = state.get("own") if finished or batches == int(state["batches"]) else None
        position = Position(batches, state["consumed"], start, own, state.get("group"))
        self._resume = position if position.batches or position.samples or start or own else None
        self._after_last, self._expects_next = Position(own=own) if finished else None, False

    def _batches_before(self, samples: int | None, batches: int) -> int:
        """The user's batches before a position; their size may have changed since it was taken."""
        size = getattr(self.loader, "batch_size", None)
        sampler = getattr(self.loader, "sampler", None)
        if samples is None or not isinstance(size, int) or isinstance(sampler, DistributedSampler):
            return batches
        return -(-samples // size)

    @property
    def consumed_batches(self) -> int:
        """Batches of this process before the next one, in the epoch under way or the one to be resumed."""
        if self._expects_next:
            return 0
        if self._resume is not None:
            return self._resume.batches // self._group_size
        reached = self.current or self._reached
        return 0 if reached is None or self._exhausted else reached.index + 1

    # what scripts read of a prepared loader

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that was handed out last is the last one."""
        return self.current is not None and self.current.last

    @property
    def remainder(self) -> int:
        """Real samples of all processes in the last step, once it is reached; -1 before, or if unknown."""
        info = self.current
        return info.global_rows if info is not None and info.last and info.global_rows is not None else -1

    @property
    def is_shared(self) -> bool:
        """Whether each process gets a part of what the loader reads, rather than all of its own."""
        return self._layout.shard.count > 1

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full step of all processes; None if unknown."""
        sampler = getattr(self.loader, "batch_sampler", None)
        size = getattr(self.loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        return size * self._group_size if isinstance(size, int) else None

    @property
    def batch_rows(self) -> int | None:
        """Rows of a full batch of this process; None if unknown."""
        total = self.total_batch_size
        return None if total is None else total // self._layout.shard.count

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._recipe is None:
            raise TypeError("A prepared loader can be copied where prepare_loader made it.")
        return _again, (self._recipe, self.loader, self.state_dict())

    def __repr__(self) -> str:
        shard = self._layout.shard
        return f"PreparedLoader({type(self.loader).__name__}, part {shard.index} of {shard.count}, epoch {self._epoch})"


def _placed(batches: Iterator[PendingBatch]) -> Iterator[Any]:
    """Batches on the device, each handed out with the one after it on the way."""
    held: list[Any] = []
    try:
        for batch in batches:
            held.append(batch.take())
            del batch
            yield held.pop()
    finally:
        batches.close()  # type: ignore[attr-defined]


def checked_count(num_batches: int) -> int:
    """A number of batches to skip, refused below 0."""
    if num_batches < 0:
        raise ConfigurationError(f"The number of batches to skip must be 0 or more, but got {num_batches}.")
    return num_batches


def _again(recipe: Callable[[Any], PreparedLoader], loader: Any, position: Mapping[str, Any]) -> PreparedLoader:
    """A prepared loader as it comes out of a pickle or a deep copy: prepared again, at the same position."""
    prepared = recipe(loader)
    prepared.load_state_dict(position)
    return prepared
