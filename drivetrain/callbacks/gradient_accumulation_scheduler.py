"""Accumulate over more, or fewer, batches from some epochs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.base import Given, RunOptions

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Changes how many micro-batches make an optimizer step, by epoch.

    `trainer.estimated_stepping_batches` takes the schedule into account. Once a run is over the Trainer accumulates
    as before.

    Args:
        scheduling: The micro-batches per step from an epoch on, by that epoch, which counts from 0: `{0: 8, 4: 2}`.
            Before the first epoch that is named it is 1.

    Raises:
        ConfigurationError: If the schedule is empty or holds other than whole numbers, if the Trainer was given
            `accumulate_grad_batches` as well, or if the task or the strategy cannot accumulate so.

    Example:
        ```python
        from drivetrain import GradientAccumulationScheduler, Trainer

        trainer = Trainer(callbacks=[GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})], logger=False)
        ```
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, dict) or not scheduling:
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): give a dict of epochs and micro-batches "
                "per step, such as {0: 1, 4: 2}.",
                code="DT-003",
            )
        for epoch, factor in scheduling.items():
            if not _is_whole(epoch, 0):
                raise ConfigurationError(
                    f"GradientAccumulationScheduler(scheduling={scheduling!r}): Epoch should be an int from 0 on, not "
                    f"{epoch!r}.",
                    code="DT-002",
                )
            if not _is_whole(factor, 1):
                raise ConfigurationError(
                    f"GradientAccumulationScheduler(scheduling={scheduling!r}): Accumulation factor should be an int "
                    f"from 1 on, not {factor!r}.",
                    code="DT-002",
                )
        self.scheduling = {0: 1, **dict(sorted(scheduling.items()))}
        self._changed = False

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the micro-batches per step in an epoch.

        Args:
            epoch: The epoch, from 0.
        """
        return self.scheduling[max(start for start in self.scheduling if start <= epoch)]

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch has more than one micro-batch per step."""
        return any(factor > 1 for factor in self.scheduling.values())

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler`: leave out "
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), or the callback.",
                code="DT-095",
            )
        if not task.automatic_optimization and self.going_to_accumulate_grad_batches():
            raise ConfigurationError(
                f"GradientAccumulationScheduler has no effect on {type(task).__name__}, which optimizes by hand "
                "(automatic_optimization = False). Step every so many batches in training_step.",
                code="DT-092",
            )
        for factor in set(self.scheduling.values()):
            given = Given(f"GradientAccumulationScheduler({self.scheduling})", factor)
            clipping = Given("Trainer(gradient_clip_val)", trainer.gradient_clip_val)
            trainer.strategy.check(RunOptions(trainer.accelerator.precision, given, clipping))

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._changed = True
        trainer.change_options(accumulate_grad_batches=self.get_accumulate_grad_batches(trainer.current_epoch))

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        if self._changed:
            self._changed = False
            trainer.change_options(accumulate_grad_batches=1)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
