"""Callback that changes the number of accumulated micro-batches by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.durations import Duration, Unit
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.base import Given, RunOptions

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Callback that changes the number of accumulated micro-batches per optimizer step at given epochs.

    `trainer.estimated_stepping_batches` takes the schedule into account. After the run the Trainer returns to its
    previous setting.

    Args:
        scheduling: A dict from an epoch, counted from 0, to the number of micro-batches per step from that epoch on,
            such as `{0: 8, 4: 2}`. Before the first epoch of the dict it is 1. An epoch may also be written as `"4
            epochs"`, or as a share of `max_epochs`: `"50%"`. Other units raise an error, since the number of steps
            depends on the schedule.

    Raises:
        ConfigurationError: If the schedule is empty or holds anything but whole numbers, if the Trainer has
            `accumulate_grad_batches` set too, or if the task or the strategy does not support accumulation.

    Example:
        ```python
        from drivetrain import GradientAccumulationScheduler, Trainer

        trainer = Trainer(callbacks=[GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})], logger=False)
        ```
    """

    def __init__(self, scheduling: Mapping[int | str | Duration, int]) -> None:
        if not isinstance(scheduling, Mapping) or not scheduling:
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): scheduling must be a dict of epochs and "
                "micro-batches per step, such as {0: 1, 4: 2}.",
            )
        by_epoch: dict[int, int] = {}
        self._shares: dict[float, int] = {}
        for given, factor in scheduling.items():
            epoch = self._epoch_of(given)
            if isinstance(epoch, float):
                self._shares[epoch] = factor
            elif _is_whole(epoch, 0):
                by_epoch[epoch] = factor
            else:
                raise ConfigurationError(
                    f"GradientAccumulationScheduler(scheduling={scheduling!r}): Epoch should be an int from 0 upwards, "
                    f"but got {given!r}.",
                )
            if not _is_whole(factor, 1):
                raise ConfigurationError(
                    f"GradientAccumulationScheduler(scheduling={scheduling!r}): Accumulation factor should be an int "
                    f"of at least 1, but got {factor!r}.",
                )
        self._by_epoch = by_epoch
        self.scheduling = {0: 1, **dict(sorted(by_epoch.items()))}
        self._changed = False

    @staticmethod
    def _epoch_of(given: Any) -> Any:
        if not isinstance(given, str | Duration) or (isinstance(given, str) and given.strip().isdigit()):
            return None if isinstance(given, float) else given
        duration = Duration.of(given, "GradientAccumulationScheduler.scheduling")
        assert duration is not None
        if duration.unit not in (Unit.EPOCHS, Unit.RUN):
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling): {given!r} is not in epochs. Steps, samples and tokens "
                "depend on the schedule itself. Use epochs (4, '4 epochs') or a fraction of the run ('50%').",
            )
        # An int is an epoch, and a float is a fraction of `max_epochs`.
        return int(duration.amount) if duration.unit is Unit.EPOCHS else float(duration.amount)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of micro-batches that one optimizer step accumulates in an epoch.

        Args:
            epoch: The index of the epoch, from 0.
        """
        return self.scheduling[max(start for start in self.scheduling if start <= epoch)]

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return True if the schedule accumulates gradients over several micro-batches in any epoch."""
        return any(factor > 1 for factor in (*self.scheduling.values(), *self._shares.values()))

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler`: remove "
                f"either Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), or the callback.",
            )
        if not task.automatic_optimization and self.going_to_accumulate_grad_batches():
            raise ConfigurationError(
                f"GradientAccumulationScheduler has no effect on {type(task).__name__}, which optimizes by hand "
                "(automatic_optimization = False). Step the optimizer every few batches in training_step instead.",
            )
        if self._shares and trainer.max_epochs < 0:
            raise ConfigurationError(
                "GradientAccumulationScheduler(scheduling) contains a fraction of the run's epochs, but the Trainer "
                "has no max_epochs. Set max_epochs, or use epoch numbers.",
            )
        shares = {int(share * trainer.max_epochs): factor for share, factor in self._shares.items()}
        self.scheduling = {0: 1, **dict(sorted({**self._by_epoch, **shares}.items()))}
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
