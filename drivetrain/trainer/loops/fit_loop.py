"""Training loop: epochs of optimizer steps, with validation in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Stage
from drivetrain.data import CombinedLoader, PendingBatch, PreparedLoader
from drivetrain.runtime.errors import DataError
from drivetrain.runtime.timing import CALLBACKS, EVALUATION, SYNC
from drivetrain.trainer.loops.batches import TrainingBatches
from drivetrain.trainer.loops.evaluation_loop import EvaluationLoop
from drivetrain.trainer.loops.progress import Phase, validation_interval
from drivetrain.trainer.loops.run_control import EpochHealth, EvaluationEnded, ValidationSchedule
from drivetrain.trainer.loops.step import DataEnded, EpochSkipped, PlainStep
from drivetrain.trainer.metrics.logged_values import MONITORING, TRAIN_END, TRAIN_EPOCH, TRAIN_STEP
from drivetrain.trainer.optimizers import begin_schedules, end_epoch_of_schedulers, step_epoch_schedulers
from drivetrain.trainer.profilers.base import BATCH, EPOCH, VALIDATION
from drivetrain.trainer.state.saved_run import SavedRun, save_for_resume
from drivetrain.trainer.task_checks import check_optimizer_states, check_saved_states

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

FOREVER = float("inf")


class FitLoop:
    """Loop that trains a task for several epochs, and runs the validations in between."""

    def __init__(
        self,
        trainer: Trainer,
        step: PlainStep,
        batches: TrainingBatches,
        validation: EvaluationLoop | None,
        health: EpochHealth,
    ) -> None:
        self._trainer, self.batches, self._validation, self._health = trainer, batches, validation, health
        self._hooks, self._progress, self._control = trainer.hooks, trainer.progress, trainer.control
        self._timing = trainer.timing
        self._schedule = ValidationSchedule(
            trainer.progress, validation_interval(trainer), trainer.check_val_every_n_epoch, validation is not None
        )
        self._schedule.set_epoch_length(batches.limit)
        watch = trainer.actions.watch
        step.spread_over(batches.shards)
        self._run_step, self._run_epoch = watch(BATCH, step.run), watch(EPOCH, self.run_epoch)
        self._run_validation = watch(VALIDATION, validation.run) if validation is not None else None
        self._next_poll: float = 0
        self._states_are_checked = False
        self._next_exchange: float = 0
        self._next_turn = 0
        self._next_validation: float = FOREVER
        self._next_due: float = 0
        self._restored: SavedRun | None = None
        self._has_trained = self._is_saved = False
        self._lacks_validation = False  # True if a signal skipped or ended the validation that was due

    @property
    def loader(self) -> PreparedLoader | CombinedLoader:
        return self.batches.loader

    @property
    def is_resuming(self) -> bool:
        return self._restored is not None

    @property
    def validates(self) -> bool:
        return self._run_validation is not None

    @property
    def validation_follows(self) -> bool:
        """True if a validation runs directly after the optimizer step that is being finished.

        `ModelCheckpoint` then waits for the validation's results before it saves.
        """
        return self._schedule.follows_this_step

    def forget_loaders(self) -> None:
        """Release the training and validation loaders, and stop their worker processes."""
        self._trainer.accelerator.forget_loader(self.loader)
        if self._validation is not None:
            self._validation.forget()

    def resume_from(self, saved: SavedRun) -> None:
        self._restored = saved

    def run(self) -> None:
        """Train the task in epochs, until a limit, a stop request or a signal ends the run."""
        trainer, control = self._trainer, self._control
        control.start_clock()
        self._schedule.restart_clock()
        self._next_turn = self._timing.first_turn(self._progress.total_batches)
        trainer.logged.enter(TRAIN_EPOCH)
        trainer.tracker_log.begin_training()
        begin_schedules(trainer)
        with self._timing.span(CALLBACKS):
            self._hooks.call("on_train_start")
        while not control.is_done(self.batches.limit, is_resuming=self.is_resuming):
            self._run_epoch()
            if control.rollback_path is not None:
                self._roll_back(control.rollback_path)
        control.finish(self._has_trained)
        if control.ends_to_be_resumed and not self._is_saved:
            self._save_for_resume()
        if control.preempted:
            return
        trainer.logged.enter(TRAIN_END)
        with self._timing.span(CALLBACKS):
            self._hooks.call("on_train_end")

    def run_epoch(self) -> None:
        """Train for one epoch. After a resume, train on the batches that are left in the checkpoint's epoch."""
        trainer, progress, control, batches = self._trainer, self._progress, self._control, self.batches
        is_again = self.is_resuming
        if not self._begin_epoch():
            return
        self._has_trained = True
        windows = batches.windows()
        # After a resume, a validation that was still due may have requested a stop.
        is_stopped = is_again and control.stop_requested and control.may_stop(batches.limit)
        finished = skipped = False
        window: list[PendingBatch] = []
        self._timing.begin_steps()
        try:
            for window in () if is_stopped else windows:
                self._run_step(window)
                batches.finished = window[-1].info
                window.clear()  # otherwise validation would run with the last batch still in memory
                if trainer.saves is not None and trainer.world_size == 1 and not control.preempted:
                    trainer.saves.check()  # several ranks must agree first, or only one of them would raise
                if control.rollback_path is not None:
                    return
                if progress.total_batches >= self._next_due:
                    self._run_due()
                if control.stop_requested and control.may_stop(batches.limit):
                    finished = self.stop_epoch()
                    break
            else:
                finished = not is_stopped or batches.are_done
        except (EpochSkipped, DataEnded):
            finished = skipped = True
            batches.snapshot.release()
            trainer.accelerator.optimizer_step.close()
        finally:
            windows.close()  # ends the loader's workers now, not when the generator is collected
            window.clear()
            self._timing.end_steps()
            # Also after an exception: the last batch must not stay in memory while hooks handle the error.
            trainer.current.leave_epoch(progress.batches_in_epoch)
            trainer.logged.skips = False
        if progress.batches_in_epoch == 0 and not (skipped or control.preempted):
            raise DataError("The training loader gave no batch in a whole epoch. Check the dataset and its filters.")
        self._end_epoch(finished)

    def _begin_epoch(self) -> bool:
        # False if a resumed epoch has no batches left to train on.
        trainer, progress = self._trainer, self._progress
        saved, self._restored = self._restored, None
        if self.batches.reload():
            self._schedule.set_epoch_length(self.batches.limit)
        self.batches.begin_epoch(saved)
        trainer.logged.enter(TRAIN_EPOCH)
        if progress.phase is not Phase.CLOSING:
            self.call_epoch_start(is_again=saved is not None and progress.batches_in_epoch > 0)
            if self.batches.is_stale and self.batches.reload():
                self._schedule.set_epoch_length(self.batches.limit)
                self.batches.begin_epoch(None)
        trainer.logged.enter(TRAIN_STEP)
        if saved is not None:
            # Last, since the hooks above have drawn random numbers and logged values.
            saved.restore_process()
            trainer.tracker_log.record_written()
            if self._schedule.is_pending:  # the checkpoint was written between a batch and its validation
                at_end = progress.batches_in_epoch >= self.batches.limit and not self._schedule.follows_a_clock
                self._validate(at_end)
            if self._lacks_validation:
                return False
            if progress.phase is Phase.CLOSING:
                self._close_epoch()
                return False
        self._health.begin_epoch()
        self._control.start_epoch()
        self._next_validation = self._schedule.next_batch()
        self._plan()
        return True

    def _roll_back(self, path: str) -> None:
        saved = SavedRun(self._trainer, path)
        saved.restore_early()
        saved.restore_weights()
        saved.restore_training()
        self._control.record_rollback()
        self.batches.snapshot.release()
        self._restored = saved

    # Between two steps

    def _run_due(self) -> None:
        progress = self._progress
        if progress.total_batches >= self._next_turn:
            self._next_turn = self._timing.turn(progress.total_batches)
        if progress.global_step >= self._next_poll or progress.total_batches >= self._next_exchange:
            self._poll()
        if progress.batches_in_epoch >= self._next_validation:
            self._next_validation = self._schedule.next_batch()
            if self._schedule.is_due:
                self._validate(at_end=self.batches.are_done)
        self._plan_due()

    def _plan(self) -> None:
        # A training step then needs only cheap comparisons to see whether anything is due.
        trainer, control = self._trainer, self._control
        trainer.tracker_log.plan()
        most = trainer.max_steps
        self._next_poll = min(trainer.tracker_log.next_step, most if most >= 0 else FOREVER)
        if trainer.max_duration is not None or not self._states_are_checked:
            self._next_poll = 0  # samples and tokens per step vary, so the next step cannot be computed
        # Counted in batches: optimizer steps may never come if all of them overflow or are skipped.
        watches = control.needs_polling or self._schedule.follows_a_clock
        self._next_exchange = control.next_exchange if watches else FOREVER
        self._plan_due()

    def _plan_due(self) -> None:
        progress = self._progress
        until_validation = self._next_validation - progress.batches_in_epoch
        # With manual optimization, one batch may take any number of optimizer steps.
        is_counted = self._trainer.task is not None and self._trainer.task.automatic_optimization
        until_poll = self._next_poll - progress.global_step if is_counted else 0
        ahead = progress.total_batches + min(until_validation, until_poll)
        self._next_due = min(self._next_turn, self._next_exchange, ahead)

    def _poll(self) -> None:
        trainer, control = self._trainer, self._control
        if not self._states_are_checked and self._progress.global_step:
            self._states_are_checked = True
            # Optimizers create their state in the first step, so an earlier check would see none.
            check_optimizer_states(trainer)
            check_saved_states(trainer)
        if self._progress.global_step >= trainer.tracker_log.next_step:
            trainer.tracker_log.write_due_values()
        if self._progress.total_batches >= self._next_exchange:
            with self._timing.span(SYNC):
                [is_due] = control.agree(trainer.saves, self._schedule.is_overdue)
            if is_due and self._schedule.is_this_epoch:
                self._schedule.record_due()
                self._validate()
        control.check_counts()
        self._plan()

    def _validate(self, at_end: bool = False) -> None:
        trainer = self._trainer
        if self._run_validation is None:
            return
        if self._control.ends_to_be_resumed:
            self._lacks_validation = True
            return
        assert trainer.task is not None
        if at_end:
            end_epoch_of_schedulers(trainer)
        # A checkpoint saved within the validation must hold the state before it.
        self.batches.mark()
        with self._timing.span(EVALUATION):
            trainer.task.on_validation_model_zero_grad()
            trainer.current.batch = None  # frees the last training batch during validation
            with trainer.current.within(Stage.VALIDATE):
                try:
                    watch = self._control.watch_evaluation
                    self._run_validation(on_results=self._schedule.record_validation, watch=watch)
                except EvaluationEnded:
                    self._lacks_validation = True
        self._schedule.restart_clock()
        trainer.logged.enter(TRAIN_STEP)
        if self._lacks_validation:
            self._save_for_resume()
        else:
            self._agree()

    def validate_within_epoch(self) -> None:
        """Run a validation now, unless one has run since the last training batch."""
        if self._schedule.is_this_epoch and self._progress.validated_at != self._progress.total_batches:
            self._validate()

    def _agree(self) -> None:
        with self._timing.span(SYNC):
            self._control.agree(self._trainer.saves)
        self._plan()

    # End of an epoch

    def _end_epoch(self, finished: bool) -> None:
        trainer, progress, control = self._trainer, self._progress, self._control
        if finished:
            end_epoch_of_schedulers(trainer)
            progress.phase = Phase.DRAINED
            if self._schedule.is_at_epoch_end or self._schedule.is_pending:
                self._validate(at_end=True)
        if control.ends_to_be_resumed and not self._is_saved:
            self._save_for_resume()
        if control.preempted or self._lacks_validation:
            return  # the hooks below read the validation's values
        trainer.logged.enter(TRAIN_EPOCH)
        trainer.tracker_log.finish_epoch(Stage.TRAIN)
        self._call(self._hooks.find_running_first("on_train_epoch_end"))
        # Once more, for values that these hooks logged.
        trainer.tracker_log.finish_epoch(Stage.TRAIN)
        trainer.logged.reset_finished()
        self._health.end_epoch()
        if finished:
            step_epoch_schedulers(trainer, plateau=True)
            progress.phase = Phase.CLOSING
        trainer.logged.enter(MONITORING)
        self._call(self._hooks.find_running_last("on_train_epoch_end"))
        if finished:
            self._close_epoch()
        else:
            self._agree()

    def stop_epoch(self) -> bool:
        # A subclass may act before the epoch stops. True if all its batches are done.
        return self.batches.are_done

    def call_epoch_start(self, is_again: bool) -> None:
        # `is_again` is True if the hooks ran before the run was resumed. A subclass may then skip them.
        self._call(self._hooks.find("on_train_epoch_start"))

    def _call(self, hooks: Iterable[Callable[[], Any]]) -> None:
        with self._timing.span(CALLBACKS):
            for hook in hooks:
                hook()

    def _save_for_resume(self) -> None:
        self._is_saved = True
        save_for_resume(self._trainer)

    def _close_epoch(self) -> None:
        self._progress.begin_epoch(self._progress.epoch + 1)
        self.batches.end_epoch()
        self._agree()
