"""Logged values on their way to the trackers."""

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
from drivetrain.trainer.metrics.logged_values import EpochValue, to_numbers
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


logger = get_logger(__name__)

_RUNS = count()
"""Numbers the runs of this process, as its peers number theirs."""

FOREVER = float("inf")
PATIENCE = timedelta(seconds=1)
"""How long a process that raised waits for all others, to reduce its last values with theirs."""


@dataclass(eq=False)
class TrackerLog:
    """Gives logged values to the trackers: a step's every so many steps, an epoch's at its end.

    Attributes:
        trainer: The trainer, whose trackers they are.
        written: The latest number of each name.
        next_step: The optimizer step whose values are written next.
        evaluated_step: The step at which the weights were saved that are evaluated; None where they are the run's own.
        step_interval: Which steps' values are written, where `log_every_n_steps` is a duration.
    """

    trainer: Trainer
    written: dict[str, float] = field(default_factory=dict)
    next_step: float = FOREVER
    step_interval: StepInterval | None = None
    evaluated_step: int | None = None
    _written_at: int = -1
    _run: int = 0

    # a step's

    def begin_training(self) -> None:
        """Count from here on what `log_every_n_steps` counts, where that is a duration."""
        every = self.trainer.log_every_n_steps
        is_counted = isinstance(every, Duration)
        self.step_interval = StepInterval(self.trainer, every, "log_every_n_steps") if is_counted else None

    def plan(self) -> None:
        """Find the next step whose values are written."""
        trainer = self.trainer
        every: Any = trainer.log_every_n_steps
        if self.step_interval is not None:
            every = self.step_interval.steps or 1  # else each step is asked
        self.next_step = (
            (trainer.global_step // every + 1) * every if every and trainer.tracker_group.keeps_values else FOREVER
        )

    def record_written(self) -> None:
        """Record that the values of this step are with the trackers."""
        self._written_at = self.trainer.global_step

    def write_due_values(self) -> None:
        """Write the step's values if they are due and were not written yet, so that no checkpoint loses them."""
        trainer, step = self.trainer, self.trainer.global_step
        if step < self.next_step or self._written_at == step:
            return
        if self.step_interval is not None and not self.step_interval.is_due(step):
            return
        self._written_at = step
        with trainer.timing.span(LOGGING):
            try:
                values = trainer.logged.synced_step_values()
            except BaseException:
                self._written_at = -1  # a peer is gone; see `write_last_step`
                raise
            if values and trainer.tracker_group.writes_here:
                numbers = to_numbers(values)
                trainer.finiteness.check_values(numbers.items(), f"at step {step}")
                self.write(numbers, step)

    def write_evaluation_step(self) -> None:
        """Write what an evaluation step logged with `on_step`, against the number of batches evaluated before."""
        values, number = self.trainer.logged.end_evaluation_batch()
        if values and self.trainer.tracker_group.writes_here:
            self.write(to_numbers(values), number)

    # an epoch's

    def finish_epoch(self, stage: Stage, keep: bool = True) -> list[EpochValue]:
        """Reduce a stage's values over the epoch; those of training are written at once."""
        trainer = self.trainer
        assert trainer.task is not None
        with trainer.timing.span(LOGGING):
            results = trainer.logged.finish_epoch(stage, trainer.task, keep)
            if stage is Stage.TRAIN and keep:
                numbers = ((result.name, float(result.value)) for result in results)
                trainer.finiteness.check_values(numbers, f"in epoch {trainer.current_epoch}")
                self.write_epoch_values(results)
        return results

    def write_epoch_values(self, results: list[EpochValue]) -> None:
        """Write an epoch's values."""
        trainer = self.trainer
        step = trainer.global_step if self.evaluated_step is None else self.evaluated_step
        values = {result.epoch_name: result.value for result in results if result.logger}
        if values and trainer.tracker_group.writes_here:
            self.write(to_numbers(values), step)

    # all

    @staticmethod
    def name_of(result: EpochValue) -> str:
        """Under which name `validate` and `test` return an epoch's value."""
        return result.name

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Give numbers to the trackers, on the processes where one is called; none of them is waited for."""
        trainer = self.trainer
        if trainer.tracker_group.writes_here:
            self.written.update(values)
            trainer.tracker_group.log({"epoch": trainer.current_epoch, **values}, step)

    # after an exception

    def write_last_step(self, though_not_due: bool = False) -> None:
        """Write the values of the last step that was taken before an exception.

        Of several processes the others may not be here to reduce values with: where not all of them come here within a
        second, trackers get this process's own.
        """
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
                f"Not all processes raised, so the last values of {', '.join(own)} (step {step}) are those of rank "
                f"{trainer.global_rank} alone, although they were logged with sync_dist=True."
            )
        self.write(to_numbers(values), step)

    @staticmethod
    def write_in_spite_of_error(write: Callable[[], None]) -> None:
        """Write values while an exception is under way, which counts for more than one of its own."""
        with suppress(Exception):
            write()

    # before and after

    def hyper_parameters_of(self, owner: Any) -> Mapping[str, Any]:
        """The hyper-parameters of a task or a data module that the trackers get."""
        return owner.hparams  # type: ignore[no-any-return]

    def begin_run(self, task: Task) -> None:
        """Let the trackers open their runs, and give them a task's hyper-parameters, where it wants that."""
        self._run = next(_RUNS)
        group = self.trainer.tracker_group
        if self.trainer.world_size > 1:
            group.share_directories()
        group.start()
        owners = [each for each in (self.trainer.datamodule, task) if each is not None]
        shown = [self.hyper_parameters_of(each) for each in owners if each.__dict__.get("_log_hyperparams", True)]
        values = {name: value for hparams in shown for name, value in hparams.items() if name != CLASS_PATH}
        if values:
            group.store_init_configuration(values)
        group.log_graph(task)

    def end_run(self, error: BaseException | None, is_training: bool) -> None:
        """Record how a run ended, and close it."""
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


# The table that `validate` and `test` print


def print_results(title: str, results: list[dict[str, float]]) -> None:
    """Print each loader's values, a line a name."""
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
