"""The steps of a task as the loops call them: through the strategy's wrapper and under the precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.accelerator.forward import under_precision
from drivetrain.runtime.nested import send_to_device
from drivetrain.strategies import StepModule
from drivetrain.strategies.precision import Precision
from drivetrain.trainer.metrics.logged_values import LoggedValues
from drivetrain.trainer.metrics.metric_states import untouched_metrics
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


@contextmanager
def muted_logging(logged: LoggedValues, task: Task) -> Iterator[None]:
    """Let nothing of what the body logs and feeds to metrics count."""
    before = logged.skips
    logged.skips = True
    try:
        with untouched_metrics(task):
            yield
    finally:
        logged.skips = before


def bind_step(model: nn.Module, step: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """A step of the task as the loop calls it: through the strategy's wrapper, if any, and under the precision.

    Args:
        model: The module to call.
        step: The task's method.
        precision: The number formats.
    """
    bare = isinstance(model, StepModule) and not (model._forward_hooks or model._forward_pre_hooks)
    return under_precision(step if bare else partial(model, step), precision)


def bind_evaluation_step(
    trainer: Trainer, task: Task, model: nn.Module, step: Callable[..., Any]
) -> Callable[..., Any]:
    """A step of the task as evaluation calls it.

    Where processes hold parts of the model, only some run the step to its end; all get what it returned and logged.

    Args:
        trainer: The trainer.
        task: Its task.
        model: What the strategy made of the task.
        step: The task's method.
    """
    strategy, logged = trainer.strategy, trainer.logged
    called = strategy.view(model, "evaluate")
    if not strategy.schedules_microbatches:
        return bind_step(called, step, trainer.accelerator.precision)

    def step_or_probe(*args: Any, probe: bool = False) -> Any:
        if not probe:
            return step(*args)
        with muted_logging(logged, task):
            return step(*args)

    bound = bind_step(called, step_or_probe, trainer.accelerator.precision)

    def shared_step(*args: Any) -> Any:
        with logged.recorded() as calls:
            output = bound(*args)
        output, calls = strategy.topology.share((output, calls))
        if not strategy.topology.computes_loss:
            output = send_to_device(output, strategy.topology.device)
            if not logged.skips:
                logged.replay(calls, task)
        return output

    return shared_step
