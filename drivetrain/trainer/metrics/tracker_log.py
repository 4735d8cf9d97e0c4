"""Writing of logged values to the experiment trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Stage
from drivetrain.callbacks.step_schedule import StepInterval
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.store_barrier import exchange_if_all_arrive
from drivetrain.runtime.terminal import print_text
from drivetrain.runtime.timing import LOGGING
from drivetrain.trackers.base import COMPLETED, outcome_of
from drivetrain.trainer.given_hyper_parameters import CLASS_PATH
from drivetrain.trainer.metrics.logged_values import EpochValue
from drivetrain.trainer.metrics.transfer import to_numbers
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


logger = get_logger(__name__)

_RUNS = count()
"""Counter of the runs in this process. It is equal on all ranks, so it can be part of an exchange's key."""

FOREVER = float("inf")
PATIENCE = timedelta(seconds=1)
"""Time that a rank waits after an exception for the other ranks, to reduce their last values together."""


@dataclass(eq=False)
class TrackerLog:
    """Writer that sends logged values to the experiment trackers.

    Values of steps are written at intervals, values of an epoch at its end.

    Attributes:
        trainer: Trainer whose trackers receive the values.
        written: Latest value of each name.
        next_step: Optimizer step whose values are written next.
        step_interval: Interval of `log_every_n_steps` if that is a duration, else None.
        evaluated_step: Optimizer step of the checkpoint that is being evaluated, or None without a checkpoint.
    """

    trainer: Trainer
    written: dict[str, float] = field(default_factory=dict)
    next_step: float = FOREVER
    step_interval: StepInterval | None = None
    evaluated_step: int | None = None
    _written_at: int = -1
    _run: int = 0

    # Step values

    def begin_training(self) -> None:
        every = self.trainer.log_every_n_steps
        is_counted = isinstance(every, Duration)
        self.step_interval = StepInterval(self.trainer, every, "log_every_n_steps") if is_counted else None

    def plan(self) -> None:
        trainer = self.trainer
        every: Any = trainer.log_every_n_steps
        if self.step_interval is not None:
            every = self.step_interval.steps or 1  # an interval not in steps is checked after each step
        self.next_step = (
            (trainer.global_step // every + 1) * every if every and trainer.tracker_group.keeps_values else FOREVER
        )

    def record_written(self) -> None:
        self._written_at = self.trainer.global_step

    def write_due_values(self) -> None:
        """Write the current step's logged values to the trackers, unless `log_every_n_steps` skips the step."""
        trainer, step = self.trainer, self.trainer.global_step
        if step < self.next_step or self._written_at == step:
            return
        if self.step_interval is not None and not self.step_interval.is_due(step):
            return
        self._written_at = step
        with trainer.timing.span(LOGGING):
            try:
                if trainer.tracker_group.writes_here:
                    trainer.logged.copy_step_values()
                values = trainer.logged.synced_step_values()
            except BaseException:
                self._written_at = -1  # a rank has failed; `write_last_step` then writes the values
                raise
            if values and trainer.tracker_group.writes_here:
                numbers = to_numbers(values)
                trainer.finiteness.check_values(numbers.items(), f"at step {step}")
                self.write(numbers, step)

    def write_evaluation_step(self) -> None:
        values, number = self.trainer.logged.end_evaluation_batch()
        if values and self.trainer.tracker_group.writes_here:
            self.write(to_numbers(values), number)

    # Epoch values

    def finish_epoch(self, stage: Stage, keep: bool = True) -> list[EpochValue]:
        trainer = self.trainer
        assert trainer.task is not None
        # A collective, so all ranks must call this.
        with trainer.timing.span(LOGGING):
            results = trainer.logged.finish_epoch(stage, trainer.task, keep)
            if stage is Stage.TRAIN and keep:
                numbers = to_numbers({result.name: result.value for result in results}).items()
                trainer.finiteness.check_values(numbers, f"in epoch {trainer.current_epoch}")
                self.write_epoch_values(results)
        return results

    def write_epoch_values(self, results: list[EpochValue]) -> None:
        trainer = self.trainer
        step = trainer.global_step if self.evaluated_step is None else self.evaluated_step
        values = {result.epoch_name: result.value for result in results if result.logger}
        if values and trainer.tracker_group.writes_here:
            self.write(to_numbers(values), step)

    # All values

    @staticmethod
    def name_of(result: EpochValue) -> str:
        # The key in the dicts that `validate` and `test` return. Subclasses may choose another.
        return result.name

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers to this rank's experiment trackers, without waiting until they are written."""
        trainer = self.trainer
        if trainer.tracker_group.writes_here:
            self.written.update(values)
            trainer.tracker_group.log({"epoch": trainer.current_epoch, **values}, step)

    # After an exception

    def write_last_step(self, though_not_due: bool = False) -> None:
        # If not all ranks arrive here within a second, trackers receive the values of this rank alone. `though_not_due`
        # also writes a step that `log_every_n_steps` does not select.
        is_alone = self.trainer.world_size == 1
        if is_alone and not though_not_due:
            self.write_in_spite_of_error(self.write_due_values)
        else:
            self.write_in_spite_of_error(lambda: self._write_without_peers(though_not_due))

    def _write_without_peers(self, though_not_due: bool) -> None:
        trainer, step = self.trainer, self.trainer.global_step
        if self._written_at == step or not trainer.tracker_group.keeps_values:
            return
        if not though_not_due and (
            step < self.next_step or not (self.step_interval is None or self.step_interval.was_due(step))
        ):
            return
        self._written_at = step
        place = f"last-values/{self._run}/{step}"
        if trainer.world_size == 1:
            values, own = trainer.logged.synced_step_values(), list[str]()
        else:
            values, own = trainer.logged.unsynced_step_values(
                lambda text: exchange_if_all_arrive(place, text, PATIENCE)
            )
        if not values or not trainer.tracker_group.writes_here:
            return
        if own:
            logger.warning(
                f"Not all processes raised an exception, so the last values of {', '.join(own)} (step {step}) could "
                f"not be reduced. The trackers receive those of rank {trainer.global_rank}, despite sync_dist=True."
            )
        self.write(to_numbers(values), step)

    @staticmethod
    def write_in_spite_of_error(write: Callable[[], None]) -> None:
        # Called while an exception is handled, which another one would hide.
        with suppress(Exception):
            write()

    # Start and end of a run

    def hyper_parameters_of(self, owner: Any) -> Mapping[str, Any]:
        return owner.hparams  # type: ignore[no-any-return]

    def begin_run(self, task: Task) -> None:
        """Start a run in each tracker, with the task's hyper-parameters and graph."""
        self._run = next(_RUNS)
        group = self.trainer.tracker_group
        if self.trainer.world_size > 1:
            group.share_directories()
        group.start()
        # The task comes last, so that its values win over equal names of the data module.
        owners = [each for each in (self.trainer.datamodule, task) if each is not None]
        shown = [self.hyper_parameters_of(each) for each in owners if each.__dict__.get("_log_hyperparams", True)]
        values = {name: value for hparams in shown for name, value in hparams.items() if name != CLASS_PATH}
        if values:
            group.store_init_configuration(values)
        group.log_graph(task)

    def end_run(self, error: BaseException | None, is_training: bool) -> None:
        trainer, control = self.trainer, self.trainer.control
        group = trainer.tracker_group
        status, message = outcome_of(error)
        if is_training and control.ends_to_be_resumed and status != "failed":
            status = str(control.signal)
        if is_training and status == COMPLETED:
            best = next((each.best_model_path for each in trainer.checkpoint_callbacks if each.best_model_path), "")
            if best:
                group.log_best_model(best)
        group.finalize(status, message)


# Table of results


def print_results(title: str, results: list[dict[str, float]]) -> None:
    for index, values in enumerate(results):
        if not values:
            continue
        heading = f"{title} results" + (f", loader {index}" if len(results) > 1 else "")
        rows = [(name, f"{value:.6g}") for name, value in values.items()]
        left = max(len(heading), *(len(name) for name, _ in rows))
        right = max(len(value) for _, value in rows)
        print_text(f"{'─' * (left + right + 4)}\n {heading}\n{'─' * (left + right + 4)}")
        for name, value in rows:
            print_text(f" {name:<{left}}  {value:>{right}}")
        print_text("─" * (left + right + 4))
