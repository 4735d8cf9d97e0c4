"""Which kind of step a task takes, chosen once before the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.loops.closure_step import ClosureStep
from drivetrain.trainer.loops.in_backward_step import InBackwardStep, refuse_in_backward
from drivetrain.trainer.loops.named_losses import NamedLossesStep, refuse_named
from drivetrain.trainer.loops.scheduled_step import ScheduledStep, refuse_unscheduled
from drivetrain.trainer.loops.split_step import SplitStep
from drivetrain.trainer.loops.step import ManualStep, PlainStep
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


def choose_step(trainer: Trainer, task: Task, model: nn.Module, splits: bool = True) -> PlainStep:
    """The step of a task under this trainer's strategy and with these optimizers.

    Args:
        trainer: The trainer.
        task: Its task.
        model: What the strategy made of the task: the module to call.
        splits: Whether a step that lacks memory may be cut, where the trainer was asked for that.

    Raises:
        ConfigurationError: The strategy cannot run such a task.
    """
    by_closure = task.automatic_optimization and (
        is_overridden(task, Task, "optimizer_step") or any(o.needs_closure for o in trainer.task_optimizers)
    )
    splits = splits and trainer.auto_micro_batch
    if splits and (by_closure or trainer.task_run.optimizer_names or not task.automatic_optimization):
        raise ConfigurationError(
            f"Trainer(auto_micro_batch=True) runs the gradients of a step again, which {type(task).__name__} computes "
            "by itself: it optimizes by hand, steps its optimizer itself, has one that evaluates the loss several "
            "times, or returns a loss for each of several. Leave auto_micro_batch out, and give a smaller batch size.",
            code="DT-092",
        )
    if trainer.optimizer_in_backward:
        refuse_in_backward(trainer, task, by_closure)
        return InBackwardStep(trainer, task, model, trainer.hooks)
    if trainer.task_run.optimizer_names and task.automatic_optimization:
        refuse_named(trainer, task, by_closure)
        return NamedLossesStep(trainer, task, model, trainer.hooks)
    if trainer.strategy.schedules_microbatches:
        refuse_unscheduled(task, trainer.strategy, by_closure)
        return ScheduledStep(trainer, task, model, trainer.hooks)
    if not task.automatic_optimization:
        return ManualStep(trainer, task, model, trainer.hooks)
    if splits:
        return SplitStep(trainer, task, model, trainer.hooks)
    return (ClosureStep if by_closure else PlainStep)(trainer, task, model, trainer.hooks)
