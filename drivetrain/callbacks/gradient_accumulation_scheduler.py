"""Accumulate over more, or fewer, batches from some epochs on."""

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
    """Changes how many micro-batches make an optimizer step, by epoch.

    `trainer.estimated_stepping_batches` takes the schedule into account. Once a run is over the Trainer accumulates
    as before.

    Args:
        scheduling: The micro-batches per step from an epoch on, by that epoch, which counts from 0: `{0: 8, 4: 2}`.
            Before the first epoch that is named it is 1. An epoch may be written as `"4 epochs"`, or as a share of
            `max_epochs`: `"50%"`. How many steps a run has depends on the schedule, so other units are refused.

    Raises:
        ConfigurationError: If the schedule is empty or holds other than whole numbers, if the Trainer was given
            `accumulate_grad_batches` as well, or if the task or the strategy cannot accumulate so.

    Example:
        ```python
        from drivetrain import GradientAccumulationScheduler, Trainer

        trainer = Trainer(callbacks=[GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})], logger=False)
        ```
    """

    def __init__(self, scheduling: Mapping[int | str | Duration, int]) -> None:
        if not isinstance(scheduling, Mapping) or not scheduling:
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): give a dict of epochs and micro-batches "
                "per step, such as {0: 1, 4: 2}.",
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
                    f"GradientAccumulationScheduler(scheduling={scheduling!r}): Epoch should be an int from 0 on, not "
                    f"{given!r}.",
                )
            if not _is_whole(factor, 1):
                raise ConfigurationError(
                    f"GradientAccumulationScheduler(scheduling={scheduling!r}): Accumulation factor should be an int "
                    f"from 1 on, not {factor!r}.",
                )
        self._by_epoch = by_epoch
        self.scheduling = {0: 1, **dict(sorted(by_epoch.items()))}
        self._changed = False

    @staticmethod
    def _epoch_of(given: Any) -> Any:
        """An epoch, or as a float a share of all; what is neither as it is."""
        if not isinstance(given, str | Duration) or (isinstance(given, str) and given.strip().isdigit()):
            return None if isinstance(given, float) else given
        duration = Duration.of(given, "GradientAccumulationScheduler.scheduling")
        assert duration is not None
        if duration.unit not in (Unit.EPOCHS, Unit.RUN):
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling): {given!r} is no epoch. How many steps, samples or tokens "
                "come when depends on the schedule itself. Give epochs (4, '4 epochs') or a share of them ('50%').",
            )
        return int(duration.amount) if duration.unit is Unit.EPOCHS else float(duration.amount)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the micro-batches per step in an epoch.

        Args:
            epoch: The epoch, from 0.
        """
        return self.scheduling[max(start for start in self.scheduling if start <= epoch)]

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch has more than one micro-batch per step."""
        return any(factor > 1 for factor in (*self.scheduling.values(), *self._shares.values()))

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler`: leave out "
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), or the callback.",
            )
        if not task.automatic_optimization and self.going_to_accumulate_grad_batches():
            raise ConfigurationError(
                f"GradientAccumulationScheduler has no effect on {type(task).__name__}, which optimizes by hand "
                "(automatic_optimization = False). Step every so many batches in training_step.",
            )
        if self._shares and trainer.max_epochs < 0:
            raise ConfigurationError(
                "GradientAccumulationScheduler(scheduling) has a share of the run's epochs, and how many there are is "
                "not known. Give the Trainer max_epochs, or name epochs.",
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
