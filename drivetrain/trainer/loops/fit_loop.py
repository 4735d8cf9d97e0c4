"""The training loop: epochs of optimizer steps, with validation in between."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drivetrain.data import BatchInfo, CombinedLoader, PreparedLoader
from drivetrain.runtime.errors import ConfigurationError, DataError
from drivetrain.trainer.state.committed import Committed, saves_within_steps
from drivetrain.trainer.state.saved_run import SavedRun, at_start_of
from drivetrain.trainer.loops.evaluation_loop import EvaluationLoop
from drivetrain.trainer.loops.loader_source import LoaderSource, batches_to_run, length_of
from drivetrain.trainer.metrics.log_scopes import MONITORING, TRAIN_END, TRAIN_EPOCH, TRAIN_STEP
from drivetrain.trainer.metrics.logged_value import to_numbers
from drivetrain.trainer.loops.step import EpochSkipped, MicroBatch, PlainStep
from drivetrain.trainer.loops.run_control import StopAgreement, raise_lost_save

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

FOREVER = float("inf")


def training_batches(trainer: Trainer, loader: PreparedLoader | CombinedLoader) -> float:
    """Batches of this process in an epoch; infinite where nothing says."""
    limit = trainer.overfit_batches or trainer.limit_train_batches
    name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
    return batches_to_run(length_of(loader), limit, name)


class FitLoop:
    """Runs epochs until something says that it is enough.

    Args:
        trainer: the trainer, whose limits count.
        step: runs one optimizer step.
        source: where the training loaders come from.
        validation: the validation loop, or None where nothing is validated.
    """

    def __init__(
        self, trainer: Trainer, step: PlainStep, source: LoaderSource, validation: EvaluationLoop | None
    ) -> None:
        task = trainer.task
        assert task is not None
        self._trainer = trainer
        self._step = step
        self._source = source
        self._validation = validation
        self._hooks = trainer.hooks
        self._progress = trainer.progress
        self._agreement = StopAgreement(trainer.world_size)
        self._loader: PreparedLoader | CombinedLoader = source.prepare_training()
        self._limit: float = FOREVER
        self._validate_every: float = FOREVER
        self._validate_after: timedelta | None = None
        self._started = time.monotonic()
        self._validated_at = self._started
        self._next_log: float = 0
        self._next_poll: float = 0
        self._next_agreement: float = 0
        self._restored: SavedRun | None = None
        self._finished: BatchInfo | None = None  # of the last window that was finished in this pass
        self._origin: dict[str, Any] | None = None  # where this pass began
        self._marked: dict[str, Any] | None = None  # where the open step began, of loaders that cannot look back
        self._marks_steps = trainer.accumulate_grad_batches > 1 or saves_within_steps(trainer)
        self.committed = Committed(task, trainer.logged, trainer.progress)
        self._written_at = -1
        self._size_up()

    @property
    def loader(self) -> PreparedLoader | CombinedLoader:
        """The prepared training loader."""
        return self._loader

    def run(self) -> None:
        """Run epochs until done."""
        trainer = self._trainer
        self._started = self._validated_at = time.monotonic()
        trainer.logged.enter(TRAIN_EPOCH)
        self._hooks.call("on_train_start")
        while not self._is_done():
            self.run_epoch()
            if trainer.rollback_path is not None:
                self._roll_back(trainer.rollback_path)
        if trainer.preempted:
            return
        trainer.logged.enter(TRAIN_END)
        self._hooks.call("on_train_end")

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
        done = self._progress.batches_in_epoch
        if self._progress.batches_are_done:
            return self._loader.state_dict()
        if self._marked is not None and self.committed.is_open:
            return self._marked
        reached = self._loader.reached
        if reached is not None and reached.index < done:
            return self._loader.state_dict()
        if self._finished is not None and self._finished.index == done - 1:
            return self._loader.state_after(self._finished)
        return at_start_of(self._loader.state_dict(), self._progress.epoch) if self._origin is None else self._origin

    def resume_from(self, saved: SavedRun) -> None:
        """Let the first epoch begin where a checkpoint left it."""
        self._restored = saved

    def run_epoch(self) -> None:
        """One pass over the training data, or what a resumed run has left of it."""
        trainer, progress, step = self._trainer, self._progress, self._step
        saved, self._restored = self._restored, None
        self._reload()
        self._finished = self._origin = None
        if saved is None:
            self._loader.set_epoch(progress.epoch)
        else:
            saved.restore_loader(self._loader)
        start = self._loader.state_dict()
        self._origin = at_start_of(start, progress.epoch) if saved is None else start
        trainer.logged.enter(TRAIN_EPOCH)
        if not progress.epoch_is_ending:
            self._hooks.call("on_train_epoch_start")
        trainer.logged.enter(TRAIN_STEP)
        if saved is not None:
            self._resume_epoch(saved)
            if progress.epoch_is_ending:
                self._close_epoch()
                return
        self._agreement.start(progress.total_batches)
        self._plan()
        windows = self._windows()
        next_validation = self._next_validation()
        finished = skipped = False
        try:
            for window in windows:
                step.run(window)
                self._finished = window[-1].info
                if trainer.saves is not None and trainer.world_size == 1 and not trainer.preempted:
                    trainer.saves.check()  # several processes agree on it first
                if trainer.rollback_path is not None:
                    return
                if progress.global_step >= self._next_poll or progress.total_batches >= self._next_agreement:
                    self._poll()
                if progress.batches_in_epoch >= next_validation:
                    next_validation = self._next_validation()
                    self._validate(at_end=self._is_last(window))
                if trainer.should_stop and self._may_stop_here():
                    finished = self._is_last(window)
                    break
            else:
                finished = True
        except EpochSkipped:
            finished = skipped = True
            self.committed.release()
        finally:
            windows.close()
            trainer.batch_info = trainer.batch = None
            trainer.logged.skips = False
        if trainer.preempted and not finished:
            return
        if progress.batches_in_epoch == 0 and not skipped:
            raise DataError("The training loader gave no batch in a whole epoch. Check the dataset and its filters.")
        self._end_epoch(finished)

    def _roll_back(self, path: str) -> None:
        """Go back to a checkpoint in the midst of the run."""
        trainer = self._trainer
        saved = SavedRun(trainer, path)
        saved.restore_early()
        saved.restore_weights()
        saved.restore_training()
        trainer.rollback_path = None
        trainer.should_stop = trainer.should_stop_agreed = False
        self._restored = saved

    def _resume_epoch(self, saved: SavedRun) -> None:
        """Take up what the checkpoint kept of this process, and validate if that was next."""
        progress = self._progress
        # Last of all: what hooks drew and logged on the way here must not count.
        saved.restore_process()
        self._written_at = progress.global_step
        if self._is_validation_pending():
            at_end = progress.batches_in_epoch >= self._limit
            self._validate(at_end=at_end)

    def _is_last(self, window: list[MicroBatch]) -> bool:
        """Whether an epoch ends with these micro-batches."""
        return window[-1].info.last or self._progress.batches_in_epoch >= self._limit

    def _windows(self) -> Generator[list[MicroBatch], None, None]:
        """The epoch's micro-batches, as many as make one optimizer step at a time."""
        loader, limit, size = self._loader, self._limit, self._trainer.accumulate_grad_batches
        skips = self._trainer.batches_to_skip
        index = self._progress.batches_in_epoch
        if index >= limit or self._progress.batches_are_done:
            return
        self._mark()
        window: list[MicroBatch] = []
        for batch in loader:
            info = loader.current
            assert info is not None  # a batch is always known to its loader
            if skips and (self._progress.epoch, index) in skips:
                index += 1
                self._progress.batches_in_epoch = index
                self._progress.total_batches += 1
                continue
            window.append(MicroBatch(batch, index, info))
            index += 1
            if len(window) == size or info.last or index == limit:
                yield window
                window = []
                if index >= limit:
                    return
                if self._marks_steps:
                    self._mark()
        if window:
            yield window

    def _mark(self) -> None:
        """Remember where this process stands before a step or a validation."""
        self.committed.mark()
        # A combination knows only where it is now.
        self._marked = self._loader.state_dict() if isinstance(self._loader, CombinedLoader) else None

    # what a step does not have to know

    def _plan(self) -> None:
        """Find the next step, and the next number of batches, at which there is anything to do beside training."""
        trainer, step = self._trainer, self._progress.global_step
        every = trainer.log_every_n_steps
        self._next_log = (step // every + 1) * every if every and trainer.loggers else FOREVER
        self._next_poll = min(self._next_log, trainer.max_steps if trainer.max_steps >= 0 else FOREVER)
        # Not counted in steps, of which there may be none: all may overflow, or be left out.
        self._next_agreement = self._agreement.next_batch if self._watches() else FOREVER

    def _watches(self) -> bool:
        """Whether clocks or peers may have something to say between validations."""
        trainer = self._trainer
        return trainer.world_size > 1 or trainer.max_time is not None or self._validate_after is not None

    def _poll(self) -> None:
        """Write what is due, and see whether to stop or validate."""
        trainer, progress = self._trainer, self._progress
        step = progress.global_step
        if step >= self._next_log:
            self.write_due_values()
        if progress.total_batches >= self._next_agreement:
            now = time.monotonic()
            late = trainer.max_time is not None and now - self._started >= trainer.max_time.total_seconds()
            due = self._validate_after is not None and now - self._validated_at >= self._validate_after.total_seconds()
            late, due = self._agree(late, due)
            if late:
                trainer.should_stop = trainer.should_stop_agreed = True
            trainer.stopped_by_time = trainer.stopped_by_time or late
            if due and self._is_validation_epoch():
                self._validate()
        if 0 <= trainer.max_steps <= step:
            trainer.should_stop_agreed = trainer.should_stop = True
        self._plan()

    def write_due_values(self) -> None:
        """Give trackers the step's values if they are due and were not given yet, so that no checkpoint loses them."""
        trainer, step = self._trainer, self._progress.global_step
        if step < self._next_log or self._written_at == step:
            return
        self._written_at = step
        values = trainer.logged.synced_step_values()
        if values and trainer.is_global_zero:
            trainer.log_metrics(to_numbers(values), self._progress.global_step)

    def _may_stop_here(self) -> bool:
        """Whether a wish to stop holds now: agreed on by all, and the least asked for is done."""
        trainer = self._trainer
        if trainer.world_size > 1 and not trainer.should_stop_agreed:
            return False
        if trainer.interrupted or trainer.preempted or trainer.stopped_by_time:
            return True
        return 0 <= trainer.max_steps <= self._progress.global_step or self._minimum_reached()

    def _minimum_reached(self) -> bool:
        trainer = self._trainer
        epochs = self._progress.epoch + (self._progress.batches_in_epoch >= self._limit)
        return epochs >= (trainer.min_epochs or 0) and self._progress.global_step >= (trainer.min_steps or 0)

    # validation

    def _next_validation(self) -> float:
        """The number of batches in this epoch after which to validate next; never where it is not this epoch's turn."""
        if self._validation is None or not self._is_validation_epoch():
            return FOREVER
        every = self._validate_every
        if every == FOREVER:
            return FOREVER
        if self._trainer.check_val_every_n_epoch is None:
            behind = self._progress.total_batches % every
            return self._progress.batches_in_epoch + (every - behind)
        done = self._progress.batches_in_epoch
        return (done // every + 1) * every

    def _is_validation_epoch(self) -> bool:
        every = self._trainer.check_val_every_n_epoch
        return every is None or (self._progress.epoch + 1) % every == 0

    def _validate(self, at_end: bool = False) -> None:
        if self._validation is None:
            return
        trainer = self._trainer
        assert trainer.task is not None
        batch, info = trainer.batch, trainer.batch_info
        if at_end:
            self._step_epoch_schedulers()
        self._mark()
        trainer.task.on_validation_model_zero_grad()
        trainer.stage = "validate"
        self._validation.run(on_results=self._record_validation)
        trainer.stage = "train"
        self._validated_at = time.monotonic()
        trainer.batch, trainer.batch_info = batch, info
        trainer.logged.enter(TRAIN_STEP)
        self._agree_now()

    def _record_validation(self) -> None:
        """Count a validation once its results are there: a checkpoint that its last hooks write includes it."""
        self._progress.validations += 1
        self._progress.validated_at = self._progress.total_batches

    def _is_validation_pending(self) -> bool:
        """Whether a validation comes before the next batch: the checkpoint was written between the two."""
        progress, every = self._progress, self._validate_every
        if self._validation is None or every == FOREVER or not self._is_validation_epoch():
            return False
        done, last = progress.total_batches, max(progress.validated_at, 0)
        if self._trainer.check_val_every_n_epoch is not None:
            before = done - progress.batches_in_epoch
            done, last = done - before, max(last - before, 0)
        return done >= (last // every + 1) * every

    def validates_after_this_step(self) -> bool:
        """Whether a validation follows the step that is being ended."""
        if self._validation is None or not self._is_validation_epoch():
            return False
        if self._validates_at_epoch_end() and self._progress.batches_in_epoch >= self._limit:
            return True
        return self._is_validation_pending()

    def _agree(self, *wishes: bool) -> tuple[bool, ...]:
        """Exchange the wish to stop with the other processes, and further ones, which are returned."""
        trainer, interruption = self._trainer, self._trainer.interruption
        lost = trainer.saves is not None and trainer.saves.has_lost
        stop, interrupted, preempted, lost, *others = self._agreement.agree(
            self._progress.total_batches,
            (trainer.should_stop, interruption.requested, interruption.preempted, lost, *wishes),
        )
        trainer.interrupted = trainer.interrupted or interrupted
        trainer.preempted = trainer.preempted or preempted
        if stop or interrupted or preempted:
            trainer.should_stop = trainer.should_stop_agreed = True
        if lost and not trainer.preempted:
            raise_lost_save(trainer.saves)
        return tuple(others)

    def _agree_now(self) -> None:
        """Let a callback's wish to stop hold for all processes, where all are at the same place anyway."""
        self._agree()
        self._plan()

    # the end of an epoch

    def _end_epoch(self, finished: bool) -> None:
        trainer, progress = self._trainer, self._progress
        progress.batches_are_done = finished
        if finished and (self._validates_at_epoch_end() or self._is_validation_pending()):
            self._validate(at_end=True)
        if finished:
            self._step_epoch_schedulers()
        if trainer.preempted:
            return
        trainer.logged.enter(TRAIN_EPOCH)
        trainer.finish_logged_epoch("train")
        for hook in self._hooks.find_early("on_train_epoch_end"):
            hook()
        trainer.finish_logged_epoch("train")
        if finished:
            trainer.update_epoch_schedulers(plateau=True)
        progress.epoch_is_ending = finished
        trainer.logged.enter(MONITORING)
        for hook in self._hooks.find_late("on_train_epoch_end"):
            hook()
        if finished:
            self._close_epoch()
        else:
            self._agree_now()

    def _close_epoch(self) -> None:
        """Turn to the next epoch."""
        self._progress.begin_epoch(self._progress.epoch + 1)
        self._finished = self._origin = None
        self._agree_now()

    def _step_epoch_schedulers(self) -> None:
        """Step the schedulers that follow epochs and watch no value; once, before the epoch's last validation."""
        if not self._progress.epoch_over:
            self._progress.epoch_over = True
            self._trainer.update_epoch_schedulers(plateau=False)

    def _validates_at_epoch_end(self) -> bool:
        """Whether validation comes at the end of the epoch: where no interval was asked for."""
        if self._validation is None or not self._is_validation_epoch():
            return False
        if self._progress.validated_at == self._progress.total_batches:
            return False
        if self._validate_after is not None:
            return False
        return self._validate_every == FOREVER and self._trainer.check_val_every_n_epoch is not None

    def _is_done(self) -> bool:
        trainer, progress = self._trainer, self._progress
        if trainer.interrupted or trainer.preempted or trainer.stopped_by_time:
            return True
        if self._restored is not None and progress.epoch_is_ending:
            return False  # a checkpoint from an epoch's last hook: the epoch is still to be closed
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= progress.epoch:
            return True
        if 0 <= trainer.max_steps <= progress.global_step:
            return True
        if self._limit == 0:
            return True
        return trainer.should_stop and self._minimum_reached()

    # the loader

    def _reload(self) -> None:
        every, progress = self._trainer.reload_dataloaders_every_n_epochs, self._progress
        if every and progress.epoch and progress.epoch % every == 0 and not progress.batches_in_epoch:
            self._trainer.accelerator.forget_loader(self._loader)
            self._loader = self._source.prepare_training(anew=True)
            self._size_up()

    def _size_up(self) -> None:
        """Work out how many batches an epoch has, and after how many to validate."""
        trainer = self._trainer
        self._limit = training_batches(trainer, self._loader)
        trainer.num_training_batches = self._limit
        interval: Any = trainer.val_check_interval
        self._validate_every, self._validate_after = FOREVER, None
        if isinstance(interval, timedelta):
            self._validate_after = interval
        elif isinstance(interval, float) and interval < 1.0:
            if math.isinf(self._limit):
                raise ConfigurationError(
                    f"val_check_interval={interval} is a fraction, but the training loader's length is not known. "
                    "Give a whole number of batches."
                )
            self._validate_every = max(1, int(self._limit * interval))
        elif isinstance(interval, int) and not isinstance(interval, bool):
            if interval > self._limit and trainer.check_val_every_n_epoch is not None:
                raise ConfigurationError(
                    f"val_check_interval={interval} is more than the {self._limit:.0f} batches of an epoch, so nothing "
                    "would be validated. Give less, or set check_val_every_n_epoch=None to count across epochs."
                )
            self._validate_every = interval
