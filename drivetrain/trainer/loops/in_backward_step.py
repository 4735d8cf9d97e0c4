"""The step of a Trainer with `optimizer_in_backward`: each parameter is stepped as its gradient is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.accelerator.in_backward import InBackward
from drivetrain.accelerator.step import StepHooks
from drivetrain.callbacks import Callback, GradientAccumulationScheduler
from drivetrain.data import PendingBatch
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.hooks import Hooks, is_redefined
from drivetrain.trainer.loops.stand_in import presence_of
from drivetrain.trainer.loops.step import PlainStep
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

READERS = (
    *("on_after_backward", "on_gradients_ready", "on_before_optimizer_step", "on_before_zero_grad"),
    *("optimizer_zero_grad", "configure_gradient_clipping", "backward"),
)
"""The hooks that are there for gradients, or run backwards by themselves."""


class InBackwardStep(PlainStep):
    """Steps within the backward, and frees each gradient there.

    Args:
        trainer: The trainer.
        task: Its task.
        model: What the strategy made of the task: the module to call.
        hooks: The overridden hooks.

    Raises:
        ConfigurationError: Something needs all gradients of a step together.
    """

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        _refuse_readers(trainer, task)
        _refuse_schedules(trainer)
        bound, clip = trainer.gradient_clip_val, trainer.strategy.gradients.clip_value
        self._in_backward = InBackward(
            [prepared.optimizer for prepared in trainer.task_optimizers],
            clip=partial(clip, value=bound) if bound else None,
            beside=presence_of(trainer.task_run.model),
            check=trainer.strategy.gradients.require_complete,
        )
        super().__init__(trainer, task, model, hooks)
        self._zero_grad, self._clears_first = self._in_backward.begin, True

    def _step_hooks(self, hooks: Hooks) -> StepHooks:
        return replace(super()._step_hooks(hooks), clip=None, in_backward=self._in_backward)

    def try_gradients(self, window: Sequence[PendingBatch]) -> None:
        """Run the forward and backward of a step, freeing its gradients without stepping."""
        with self._in_backward.only_freeing():
            super().try_gradients(window)

    def _finish(self, window: list[PendingBatch], output: Any, steps: int) -> bool:
        self._in_backward.end()
        return super()._finish(window, output, steps)

    def _decide_weighted(self, output: Any) -> bool | None:
        weighted = super()._decide_weighted(output)
        if weighted:
            raise ConfigurationError(
                f"{type(self._task).__name__}.training_step returned a loss with a weight, by which all gradients of "
                "the step would be scaled, but optimizer_in_backward=True frees each once it is stepped with. Return "
                "the mean loss alone, or leave optimizer_in_backward out.",
                code="DT-093",
            )
        return weighted


def refuse_in_backward(trainer: Trainer, task: Task, by_closure: bool) -> None:
    """Refuse a task that does not take one backward and one step of each optimizer for a batch.

    Args:
        trainer: The trainer.
        task: Its task.
        by_closure: Whether an optimizer or the task's `optimizer_step` takes a closure.

    Raises:
        ConfigurationError: Names what, and what to do.
    """
    name = type(task).__name__
    reason = ""
    if not task.automatic_optimization:
        reason = f"{name} optimizes by hand (automatic_optimization = False)"
    elif by_closure:
        reason = f"{name} has an optimizer_step of its own, or an optimizer that evaluates the loss several times"
    elif trainer.task_run.optimizer_names:
        reason = f"{name} returns a loss for each of several optimizers, whose backwards share parameters"
    if reason:
        raise ConfigurationError(
            f"Trainer(optimizer_in_backward=True) steps each parameter once, within the one backward of a step, but "
            f"{reason}. Leave optimizer_in_backward out.",
            code="DT-093",
        )


def _refuse_readers(trainer: Trainer, task: Task) -> None:
    owners: list[tuple[Any, type]] = [(task, Task), *((callback, Callback) for callback in trainer.callbacks)]
    found = [
        f"{type(owner).__name__}.{name}"
        for owner, base in owners
        for name in READERS
        if hasattr(base, name) and is_redefined(owner, base, name)
    ]
    if found:
        raise ConfigurationError(
            f"Trainer(optimizer_in_backward=True) steps with each gradient as it is ready and frees it, so "
            f"{', '.join(found)} would find no gradients. Leave "
            f"{'it' if len(found) == 1 else 'them'}, or optimizer_in_backward, out.",
            code="DT-093",
        )


def _refuse_schedules(trainer: Trainer) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            raise ConfigurationError(
                f"Trainer(optimizer_in_backward=True) keeps no gradients, so {type(callback).__name__} cannot let them "
                "accumulate. Leave one of the two out.",
                code="DT-093",
            )
