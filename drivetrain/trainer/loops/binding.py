"""The steps of a task as the loops call them: through the strategy's wrapper and under the precision."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
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
    from drivetrain.trainer.loops.current_run import CurrentRun
    from drivetrain.trainer.trainer import Trainer


class DataEnded(Exception):
    """A step that takes its batches from an iterator found no more, and did not handle that."""


Following = Callable[[], tuple[Any, int, int] | None]


def as_taken(task: Task, name: str, following: Following = lambda: None) -> Callable[..., Any]:
    """A step of the task that is called with a batch, its number and more: it may take the batch alone.

    A step whose argument is named `dataloader_iter` gets an iterator instead, which gives the batch, its number and
    that of its loader, and then those that follow.

    Args:
        task: The task.
        name: Of its method.
        following: Takes the batch that follows out of the loop; None where there is none.
    """
    step: Callable[..., Any] = getattr(task, name)
    parameters = list(inspect.signature(step).parameters.values())
    if any(each.name == "dataloader_iter" for each in parameters):
        return partial(_call_with_iterator, step, following)
    takes_more = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return step if takes_more or len(parameters) != 1 else partial(_call_with_batch, step)


def without_missing(step: Callable[..., Any]) -> Callable[..., Any]:
    """A training step that leaves out a batch that is None, such as one in which a `collate_fn` found nothing.

    Args:
        step: The step.
    """

    def run(batch: Any, *args: Any) -> Any:
        if batch is not None:
            return step(batch, *args)
        words = "train_dataloader yielded None. If this was on purpose, ignore this warning: the batch is left out."
        warnings.warn(words, stacklevel=2)
        return None

    return run


def _call_with_batch(step: Callable[..., Any], batch: Any, *_: Any) -> Any:
    return step(batch)


def _call_with_iterator(
    step: Callable[..., Any], following: Following, batch: Any, batch_idx: int, dataloader_idx: int = 0
) -> Any:
    try:
        return step(_and_following((batch, batch_idx, dataloader_idx), following))
    except StopIteration as end:
        raise DataEnded from end


def _and_following(given: tuple[Any, int, int], following: Following) -> Iterator[tuple[Any, int, int]]:
    yield given
    while (taken := following()) is not None:
        yield taken


class Feed:
    """The batches of one loader as an evaluation runs over them; a step may take some by itself.

    Args:
        batches: The batches.
        loader: The loader that they are from.
        current: Where the run records what it is at.
        dataloader_idx: The loader's number.

    Attributes:
        batch: The batch that was taken last.
        index: Its number.
    """

    def __init__(self, batches: Iterable[Any], loader: Any, current: CurrentRun, dataloader_idx: int) -> None:
        self._batches, self._loader, self._current = iter(batches), loader, current
        self._position = dataloader_idx
        self.batch: Any = None
        self.index = -1

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        self.batch = self._current.batch = next(self._batches)
        self._current.batch_info = self._loader.current
        self.index += 1
        return self.batch

    def following(self) -> tuple[Any, int, int] | None:
        """The next batch, its number and the loader's; None at the end."""
        for batch in self:
            return batch, self.index, self._position
        return None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *error: object) -> None:
        """Let the last batch go, record that none is under way, and end the workers of a pass that is left early."""
        self.batch = None
        self._batches = iter(())
        self._current.leave_batch()


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
