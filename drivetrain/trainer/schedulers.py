"""When learning-rate schedulers step: always once per optimizer step or epoch, on any number of processes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from drivetrain.accelerator.scheduler import cover_new_groups
from drivetrain.callbacks.support.rhythm import StepRhythm
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.trainer.optimizers import SchedulerConfig
from drivetrain.trainer.state.progress import Phase

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


def begin_schedules(trainer: Trainer) -> None:
    """Count from here on what schedulers follow that follow neither steps nor epochs; called when training starts.

    Args:
        trainer: The trainer.
    """
    for config in trainer.lr_scheduler_configs:
        is_counted = isinstance(config.frequency, Duration)
        config.rhythm = StepRhythm(trainer, config.frequency, "frequency of a scheduler") if is_counted else None  # type: ignore[arg-type]


def step_step_schedulers(trainer: Trainer) -> None:
    """Step the schedulers that follow optimizer steps; called only after a step that was not skipped."""
    step = trainer.global_step
    for config in trainer.lr_scheduler_configs:
        if config.interval != "step":
            continue
        if step % config.frequency == 0 if config.rhythm is None else config.rhythm.is_due(step):  # type: ignore[operator]
            _step(trainer, config)


def step_epoch_schedulers(trainer: Trainer, plateau: bool) -> None:
    """Step the schedulers that follow epochs.

    Args:
        trainer: The trainer.
        plateau: Step those that watch a value, which is known only when validation is over; or the others.
    """
    if trainer.task is None or not trainer.task.automatic_optimization:
        return  # who optimizes by hand steps schedulers by hand
    epoch = trainer.current_epoch + 1
    for config in trainer.lr_scheduler_configs:
        if config.interval == "epoch" and config.reduce_on_plateau is plateau and epoch % config.frequency == 0:  # type: ignore[operator]
            _step(trainer, config)


def end_epoch_of_schedulers(trainer: Trainer) -> None:
    """Step the schedulers that follow epochs and watch no value; once an epoch, with its last batch.

    Args:
        trainer: The trainer.
    """
    if trainer.progress.phase < Phase.SCHEDULED:
        trainer.progress.phase = Phase.SCHEDULED
        step_epoch_schedulers(trainer, plateau=False)


def _step(trainer: Trainer, config: SchedulerConfig) -> None:
    assert trainer.task is not None
    value: Any = None
    if config.reduce_on_plateau:
        value = trainer.callback_metrics.get(config.monitor or "")
        if value is None:
            known = sorted(trainer.callback_metrics)
            message = f"ReduceLROnPlateau conditioned on metric {config.monitor!r} which is not available"
            if config.strict:
                raise ConfigurationError(
                    f"{message}. Available metrics are: {', '.join(known) or 'none'}."
                    f"{nearest(config.monitor or '', known)} Log it, or set strict=False in the scheduler's dict.",
                    code="DT-089",
                )
            warnings.warn(f"{message} but strict is `False`: the rate stays as it is.", RuntimeWarning, stacklevel=2)
            return
    cover_new_groups(config.scheduler)
    trainer.task.lr_scheduler_step(config.scheduler, value)
