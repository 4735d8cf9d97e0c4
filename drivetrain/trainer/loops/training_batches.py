"""The training batches of an epoch: one window for each optimizer step, and where in the data a run is."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, cast

from drivetrain.callbacks import GradientAccumulationScheduler
from drivetrain.data import BatchInfo, CombinedLoader, PendingBatch, PreparedLoader
from drivetrain.runtime.timing import DATA, IDLE
from drivetrain.trainer.loops.loader_source import LoaderSource, batches_to_run, check_equal_lengths, length_of
from drivetrain.trainer.state.committed import Committed, saves_within_steps
from drivetrain.trainer.state.saved_run import at_start_of

if TYPE_CHECKING:
    from drivetrain.trainer.state.saved_run import SavedRun
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

FOREVER = float("inf")


def epoch_length(trainer: Trainer, loader: PreparedLoader | CombinedLoader) -> float:
    """Batches of this process in an epoch; infinite where this is not known."""
    limit = trainer.overfit_batches or trainer.limit_train_batches
    name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
    return batches_to_run(length_of(loader), limit, name)


def estimate_steps(trainer: Trainer, loader: PreparedLoader | CombinedLoader) -> float:
    """Optimizer steps that `fit` takes; infinite where this is not known."""
    batches = epoch_length(trainer, loader)
    if trainer.max_epochs < 0 or batches == FOREVER:
        steps = FOREVER
    else:
        steps = sum(-(-batches // size) for size in _window_sizes(trainer))
    return min(steps, trainer.max_steps) if trainer.max_steps >= 0 else steps


def _window_sizes(trainer: Trainer) -> list[int]:
    """Micro-batches of a step in each epoch of the run."""
    schedules = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]
    if not schedules:
        return [trainer.accumulate_grad_batches] * trainer.max_epochs
    return [schedules[-1].get_accumulate_grad_batches(epoch) for epoch in range(trainer.max_epochs)]


class TrainingBatches:
    """The training batches of one epoch after the other.

    Args:
        trainer: The trainer, whose limits count.
        source: Where the loaders come from.

    Attributes:
        loader: The prepared training loader.
        limit: Batches of this process in an epoch; infinite where this is not known.
        finished: The last batch of the last window that was finished in this pass over the data.
        committed: What this process's state was when the last step or validation was finished.
    """

    def __init__(self, trainer: Trainer, source: LoaderSource) -> None:
        self._trainer, self._source = trainer, source
        self._progress = trainer.progress
        self.finished: BatchInfo | None = None
        self._origin: dict[str, Any] | None = None  # where this pass began
        self._marked: dict[str, Any] | None = None  # where the open step began, of loaders that cannot look back
        self._saves_within_steps = saves_within_steps(trainer)
        self.committed = Committed(cast("Task", trainer.task), trainer.logged, trainer.progress)
        self._feed: Iterator[PendingBatch] = iter(())  # the batches of the epoch under way
        self.limit: float = FOREVER
        self.loader: PreparedLoader | CombinedLoader
        self._take(source.prepare_training())

    @property
    def is_stale(self) -> bool:
        """Whether what makes the loader now makes another one."""
        return self._source.is_stale

    @property
    def shards(self) -> int:
        """Over how many processes the rows of a step are spread; 1 where each reads a loader as it is."""
        trainer = self._trainer
        loaders = self.loader.loaders if isinstance(self.loader, CombinedLoader) else [self.loader]
        reads_own = any(trainer.shard_of(each) is not None for each in loaders)
        return 1 if reads_own else trainer.strategy.topology.data_shard.count

    def reload(self) -> bool:
        """Make the loader again, where it is to be in this epoch. Returns whether it was."""
        every, progress = self._trainer.reload_dataloaders_every_n_epochs, self._progress
        is_due = every and progress.epoch and progress.epoch % every == 0
        if progress.batches_in_epoch or not (is_due or self.is_stale):
            return False
        self._trainer.accelerator.forget_loader(self.loader)
        self._take(self._source.prepare_training(again=True))
        return True

    def begin_epoch(self, saved: SavedRun | None) -> None:
        """Go to the epoch's first batch, or to the one that comes next after a checkpoint.

        Args:
            saved: The checkpoint, if this is the epoch that it was written in.
        """
        self.finished = None
        if saved is None:
            self.loader.set_epoch(self._progress.epoch)
            self._origin = at_start_of(self.loader.state_dict(), self._progress.epoch)
        else:
            saved.restore_loader(self.loader)
            self._origin = self.loader.state_dict()

    def end_epoch(self) -> None:
        """Leave the epoch: the next one begins with what the loader then draws its order from."""
        self.finished = self._origin = None

    def mark(self) -> None:
        """Remember where this process stands before a step or a validation."""
        self.committed.mark()
        # A combination has only its present position.
        self._marked = self.loader.state_dict() if isinstance(self.loader, CombinedLoader) else None

    def windows(self) -> Generator[list[PendingBatch], None, None]:
        """The epoch's micro-batches, as many as make one optimizer step at a time.

        All of a window are read before its first is computed on, which shows how many there are; each is brought to the
        device when its turn comes.
        """
        limit, progress = self.limit, self._progress
        if progress.batches_in_epoch >= limit or progress.batches_are_done:
            return
        self.mark()
        self._feed = iter(
            self._trainer.actions.iterate_training(self.loader.iterate_pending(limit, together=True), self.loader)
        )
        try:
            yield from self._windows()
        finally:
            self._feed = iter(())  # ends the workers of a loader that was not read to its end

    def _windows(self) -> Iterator[list[PendingBatch]]:
        limit, size, progress = self.limit, self._trainer.accumulate_grad_batches, self._progress
        skips, timing = self._trainer.control.batches_to_skip, self._trainer.timing
        index = progress.batches_in_epoch
        marks_steps = size > 1 or self._saves_within_steps
        window: list[PendingBatch] = []
        if timing.on:
            timing.enter(DATA)
        for batch in self._feed:
            if skips and (progress.epoch, index) in skips:
                index += 1
                progress.batches_in_epoch = index
                progress.total_batches += 1
                continue
            batch.batch_idx = index
            window.append(batch)
            index += 1
            is_full = len(window) == size or batch.info.last or index == limit
            del batch  # the window alone holds it, and is cleared with its step
            if is_full:
                if timing.on:
                    timing.enter(IDLE)
                yield window
                index = max(index, progress.batches_in_epoch)  # a step may have taken more
                window = []
                if index >= limit:
                    return
                if marks_steps:
                    self.mark()
                if timing.on:
                    timing.enter(DATA)
        if window:
            yield window

    def following(self, index: int) -> PendingBatch | None:
        """Take the batch after one out of the epoch, for a step that asks for more than its own; None at the end.

        Args:
            index: The number of the batch before it.
        """
        if index + 1 >= self.limit:
            return None
        for batch in self._feed:
            batch.batch_idx = index + 1
            return batch
        return None

    @property
    def are_done(self) -> bool:
        """Whether the epoch ends with the window that was finished last."""
        return (self.finished is not None and self.finished.last) or self._progress.batches_in_epoch >= self.limit

    def positions(self) -> list[dict[str, Any]]:
        """Where in the data the last finished step left each loader that the training data consist of."""
        position = self._position()
        loaders: list[dict[str, Any]] = position.get("loaders", [position])
        return loaders

    def combined_position(self) -> dict[str, Any] | None:
        """What a combination of loaders keeps beside their positions; None where there is one loader."""
        position = self._position()
        return {name: position[name] for name in ("index", "ended")} if "loaders" in position else None

    def _position(self) -> dict[str, Any]:
        done, reached = self._progress.batches_in_epoch, self.loader.reached
        if self._progress.batches_are_done:
            return self.loader.state_dict()
        if self._marked is not None and self.committed.is_open:
            return self._marked
        if reached is not None and reached.index < done:
            return self.loader.state_dict()
        if self.finished is not None and self.finished.index == done - 1:
            return self.loader.state_after(self.finished)
        return at_start_of(self.loader.state_dict(), self._progress.epoch) if self._origin is None else self._origin

    def _take(self, loader: PreparedLoader | CombinedLoader) -> None:
        self.loader = loader
        self.limit = self._trainer.current.training_batches = epoch_length(self._trainer, loader)
        check_equal_lengths(self.limit, "training")
