"""Logged values on their way to the trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.callbacks.stage import Stage
from drivetrain.trainer.metrics.logged_value import EpochValue, to_numbers
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

FOREVER = float("inf")


class TrackerLog:
    """Gives logged values to the trackers: a step's every so many steps, an epoch's at its end.

    Args:
        trainer: the trainer, whose trackers they are.

    Attributes:
        written: the latest number of each name.
        next_step: the optimizer step whose values are written next.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.written: dict[str, float] = {}
        self.next_step: float = FOREVER
        self._written_at = -1

    # a step's

    def plan(self) -> None:
        """Find the next step whose values are written."""
        trainer = self._trainer
        every = trainer.log_every_n_steps
        self.next_step = (trainer.global_step // every + 1) * every if every and trainer.loggers else FOREVER

    def record_written(self) -> None:
        """Record that the values of this step are with the trackers."""
        self._written_at = self._trainer.global_step

    def write_due_values(self) -> None:
        """Write the step's values if they are due and were not written yet, so that no checkpoint loses them."""
        trainer, step = self._trainer, self._trainer.global_step
        if step < self.next_step or self._written_at == step:
            return
        self._written_at = step
        values = trainer.logged.synced_step_values()
        if values and trainer.is_global_zero:
            numbers = to_numbers(values)
            trainer.finiteness.check_values(numbers.items(), f"at step {step}")
            self.write(numbers, step)

    def write_evaluation_step(self) -> None:
        """Write what an evaluation step logged with `on_step`, against the number of batches evaluated before."""
        values, number = self._trainer.logged.end_evaluation_batch()
        if values and self._trainer.loggers and self._trainer.is_global_zero:
            self.write(to_numbers(values), number)

    # an epoch's

    def finish_epoch(self, stage: Stage, keep: bool = True) -> list[EpochValue]:
        """Reduce a stage's values over the epoch; those of training are written at once.

        Args:
            stage: the stage.
            keep: whether the values become visible; not after a sanity check.
        """
        trainer = self._trainer
        assert trainer.task is not None
        results = trainer.logged.finish_epoch(stage, trainer.task, keep)
        if stage is Stage.TRAIN and keep:
            numbers = ((result.name, float(result.value)) for result in results)
            trainer.finiteness.check_values(numbers, f"in epoch {trainer.current_epoch}")
            self.write_epoch_values(results)
        return results

    def write_epoch_values(self, results: list[EpochValue]) -> None:
        """Write an epoch's values."""
        trainer = self._trainer
        values = {result.epoch_name: result.value for result in results if result.logger}
        if values and trainer.loggers and trainer.is_global_zero:
            self.write(to_numbers(values), trainer.global_step)

    # all

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Give numbers to the trackers; only the main process does anything.

        Args:
            values: names and numbers.
            step: the optimizer step; for the values of evaluation steps, the number of batches evaluated before.
        """
        trainer = self._trainer
        if not trainer.is_global_zero or not trainer.loggers:
            return
        self.written.update(values)
        for tracker in trainer.loggers:
            tracker.log({"epoch": trainer.current_epoch, **values}, step)

    def write_hyper_parameters(self, task: Task) -> None:
        """Give a task's hyper-parameters to the trackers, where it wants that."""
        if self._trainer.is_global_zero and task.hparams and task.__dict__.get("_log_hyperparams", True):
            for tracker in self._trainer.loggers:
                tracker.store_init_configuration(dict(task.hparams))
