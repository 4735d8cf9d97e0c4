"""The training loop: epochs of optimizer steps, with validation in between."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drivetrain.data import CombinedLoader, PreparedLoader
from drivetrain.runtime.errors import ConfigurationError, DataError
from drivetrain.trainer.evaluation_loop import EvaluationLoop
from drivetrain.trainer.loaders import LoaderSource, batches_to_run, length_of
from drivetrain.trainer.logged_values import MONITORING, TRAIN_END, TRAIN_EPOCH, TRAIN_STEP, to_numbers
from drivetrain.trainer.optimization_step import EpochSkipped, MicroBatch, OptimizationStep
from drivetrain.trainer.stopping import StopAgreement

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

FOREVER = float("inf")


class FitLoop:
    """Runs epochs until something says that it is enough.

    Args:
        trainer: the trainer, whose limits count.
        step: runs one optimizer step.
        source: where the training loaders come from.
        validation: the validation loop, or None where nothing is validated.
    """

    def __init__(
        self, trainer: Trainer, step: OptimizationStep, source: LoaderSource, validation: EvaluationLoop | None
    ) -> None:
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
        self._next_look: float = 0
        self._next_talk: float = 0
        self._validated_at_end = False
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
        trainer.logged.enter(TRAIN_END)
        self._hooks.call("on_train_end")

    def run_epoch(self) -> None:
        """One pass over the training data."""
        trainer, progress, step = self._trainer, self._progress, self._step
        self._reload()
        self._loader.set_epoch(progress.epoch)
        self._validated_at_end = False
        trainer.logged.enter(TRAIN_EPOCH)
        self._hooks.call("on_train_epoch_start")
        trainer.logged.enter(TRAIN_STEP)
        self._agreement.start(progress.total_batches)
        self._plan()
        windows = self._windows()
        next_validation = self._next_validation()
        finished = skipped = False
        try:
            for window in windows:
                step.run(window)
                if progress.global_step >= self._next_look or progress.total_batches >= self._next_talk:
                    self._look()
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
        finally:
            windows.close()
            trainer.batch_info = trainer.batch = None
            trainer.logged.skips = False
        if progress.batches_in_epoch == 0 and not skipped:
            raise DataError("The training loader gave no batch in a whole epoch. Check the dataset and its filters.")
        self._end_epoch(finished)

    def _is_last(self, window: list[MicroBatch]) -> bool:
        """Whether an epoch ends with these micro-batches."""
        return window[-1].info.last or self._progress.batches_in_epoch >= self._limit

    def _windows(self) -> Generator[list[MicroBatch], None, None]:
        """The epoch's micro-batches, as many as make one optimizer step at a time."""
        loader, limit, size = self._loader, self._limit, self._trainer.accumulate_grad_batches
        index = self._progress.batches_in_epoch
        if index >= limit:
            return
        window: list[MicroBatch] = []
        for batch in loader:
            info = loader.current
            assert info is not None  # a batch is always known to its loader
            window.append(MicroBatch(batch, index, info))
            index += 1
            if len(window) == size or info.last or index == limit:
                yield window
                window = []
                if index >= limit:
                    return
        if window:
            yield window

    # what a step does not have to know

    def _plan(self) -> None:
        """Find the next step, and the next number of batches, at which there is anything to do beside training."""
        trainer, step = self._trainer, self._progress.global_step
        every = trainer.log_every_n_steps
        self._next_log = (step // every + 1) * every if every and trainer.loggers else FOREVER
        self._next_look = min(self._next_log, trainer.max_steps if trainer.max_steps >= 0 else FOREVER)
        # Not counted in steps, of which there may be none: all may overflow, or be left out.
        self._next_talk = self._agreement.next_batch if self._watches() else FOREVER

    def _watches(self) -> bool:
        """Whether clocks or peers may have something to say between validations."""
        trainer = self._trainer
        return trainer.world_size > 1 or trainer.max_time is not None or self._validate_after is not None

    def _look(self) -> None:
        """Write what is due, and see whether to stop or validate."""
        trainer, progress = self._trainer, self._progress
        step = progress.global_step
        if step >= self._next_log:
            self._write_step_values()
        if progress.total_batches >= self._next_talk:
            now = time.monotonic()
            late = trainer.max_time is not None and now - self._started >= trainer.max_time.total_seconds()
            due = self._validate_after is not None and now - self._validated_at >= self._validate_after.total_seconds()
            stop, interrupted, late, due = self._agreement.agree(
                progress.total_batches, (trainer.should_stop, trainer.interruption.requested, late, due)
            )
            if stop or interrupted or late:
                trainer.should_stop = trainer.should_stop_agreed = True
            trainer.interrupted = trainer.interrupted or interrupted
            trainer.stopped_by_time = trainer.stopped_by_time or late
            if due and self._is_validation_epoch():
                self._validate()
        if 0 <= trainer.max_steps <= step:
            trainer.should_stop_agreed = trainer.should_stop = True
        self._plan()

    def _write_step_values(self) -> None:
        trainer = self._trainer
        values = trainer.logged.synced_step_values()
        if values and trainer.is_global_zero:
            trainer.log_metrics(to_numbers(values), self._progress.global_step)

    def _may_stop_here(self) -> bool:
        """Whether a wish to stop holds now: agreed on by all, and the least asked for is done."""
        trainer = self._trainer
        if trainer.world_size > 1 and not trainer.should_stop_agreed:
            return False
        if trainer.interrupted or trainer.stopped_by_time or 0 <= trainer.max_steps <= self._progress.global_step:
            return True
        return self._has_done_the_least()

    def _has_done_the_least(self) -> bool:
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
            self._validated_at_end = True
            self._step_epoch_schedulers()
        trainer.task.on_validation_model_zero_grad()
        trainer.stage = "validate"
        self._validation.run()
        trainer.stage = "train"
        self._validated_at = time.monotonic()
        self._progress.validations += 1
        trainer.batch, trainer.batch_info = batch, info
        trainer.logged.enter(TRAIN_STEP)
        self._agree_now()

    def _agree_now(self) -> None:
        """Let a callback's wish to stop hold for all processes, where all are at the same place anyway."""
        trainer = self._trainer
        (stop, interrupted) = self._agreement.agree(
            self._progress.total_batches, (trainer.should_stop, trainer.interruption.requested)
        )
        trainer.interrupted = trainer.interrupted or interrupted
        if stop or interrupted:
            trainer.should_stop = trainer.should_stop_agreed = True
        self._plan()

    # the end of an epoch

    def _end_epoch(self, finished: bool) -> None:
        trainer, progress = self._trainer, self._progress
        if finished and self._validates_at_epoch_end():
            self._validate(at_end=True)
        if finished:
            self._step_epoch_schedulers()
        trainer.logged.enter(TRAIN_EPOCH)
        trainer.finish_logged_epoch("train")
        for hook in self._hooks.find_early("on_train_epoch_end"):
            hook()
        trainer.finish_logged_epoch("train")
        if finished:
            trainer.update_epoch_schedulers(plateau=True)
        trainer.logged.enter(MONITORING)
        for hook in self._hooks.find_late("on_train_epoch_end"):
            hook()
        if finished:
            progress.begin_epoch(progress.epoch + 1)
        self._agree_now()

    def _step_epoch_schedulers(self) -> None:
        """Step the schedulers that follow epochs and watch no value; once, before the epoch's last validation."""
        if not self._progress.epoch_over:
            self._progress.epoch_over = 1
            self._trainer.update_epoch_schedulers(plateau=False)

    def _validates_at_epoch_end(self) -> bool:
        """Whether validation comes at the end of the epoch: where no interval was asked for."""
        if self._validated_at_end or self._validation is None or not self._is_validation_epoch():
            return False
        if self._validate_after is not None:
            return False
        return self._validate_every == FOREVER and self._trainer.check_val_every_n_epoch is not None

    def _is_done(self) -> bool:
        trainer, progress = self._trainer, self._progress
        if trainer.interrupted or trainer.stopped_by_time:
            return True
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= progress.epoch:
            return True
        if 0 <= trainer.max_steps <= progress.global_step:
            return True
        if self._limit == 0:
            return True
        return trainer.should_stop and self._has_done_the_least()

    # the loader

    def _reload(self) -> None:
        every, progress = self._trainer.reload_dataloaders_every_n_epochs, self._progress
        if every and progress.epoch and progress.epoch % every == 0 and not progress.batches_in_epoch:
            self._trainer.accelerator.forget_loader(self._loader)
            self._loader = self._source.prepare_training()
            self._size_up()

    def _size_up(self) -> None:
        """Work out how many batches an epoch has, and after how many to validate."""
        trainer = self._trainer
        length = length_of(self._loader)
        limit = trainer.overfit_batches or trainer.limit_train_batches
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
        self._limit = batches_to_run(length, limit, name)
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
