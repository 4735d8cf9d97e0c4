"""A trial changes nothing: everything of a run as it was, once the trial is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.data.randomness import kept_generators
from drivetrain.runtime.seeds import isolated_random_state
from drivetrain.strategies.gradients import local_part
from drivetrain.trainer.metrics.metric_states import find_metrics, metric_states, restore_metric_states
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


@contextmanager
def undone(trainer: Trainer, task: Task, trains: bool) -> Iterator[None]:
    """Put everything back in the end that the body changes, also where it raises.

    That is: counters, weights, buffers, optimizers, schedulers, the loss scale, what was logged, the states of metrics,
    the generators of random numbers, and what the run is at. Each process puts its own part back, without the others.

    Args:
        trainer: The trainer, which has placed the task.
        task: The task.
        trains: Whether the body steps optimizers.

    Raises:
        ConfigurationError: The body would train, and the strategy keeps weights where they cannot be put back.
    """
    progress, metrics = trainer.progress.state_dict(), metric_states(find_metrics(task))
    with ExitStack() as stack:
        stack.enter_context(isolated_random_state(devices=True))
        stack.enter_context(kept_generators(task, trainer.datamodule))
        for part in (trainer.control, trainer.current, trainer.accelerator.optimizer_step, trainer.logged):
            stack.enter_context(part.kept())
        stack.callback(restore_metric_states, task, metrics)
        stack.callback(trainer.progress.load_state_dict, progress)
        stack.callback(_TrainedState(trainer, task, trains).restore)
        yield


class _TrainedState:
    """Copies of what training changes, on the CPU where that is possible, so that trials have the device's memory.

    Args:
        trainer: The trainer.
        task: Its task.
        trains: Whether optimizers step.
    """

    def __init__(self, trainer: Trainer, task: Task, trains: bool) -> None:
        engine, model = trainer.accelerator, trainer.task_run.model
        assert model is not None
        weights = engine.strategy.state.parameters_in_place(model).values() if trains else ()
        tensors = [local_part(each.detach()) for each in (*weights, *task.buffers())]
        self._tensors = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]
        self._optimizers = [
            (
                each.optimizer,
                _copy(dict(each.optimizer.state)),
                [_group(group) for group in each.optimizer.param_groups],
            )
            for each in (trainer.task_optimizers if trains else ())
        ]
        # Those that a task steps by hand.
        others: list[Any] = [*(engine.prepared.schedulers if trains else ()), engine.precision]
        self._others = [(one, deepcopy(one.state_dict())) for one in others]

    def restore(self) -> None:
        """Put the copies back in place."""
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
        for optimizer, state, groups in self._optimizers:
            optimizer.zero_grad()
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                group.update(kept)
        for one, saved in self._others:
            one.load_state_dict(saved)


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a parameter group."""
    return {name: _copy(value) for name, value in group.items() if name != "params"}


def _copy(value: Any) -> Any:
    """A copy whose tensors are no one else's; what they are kept under stays the same."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return type(value)(_copy(item) for item in value) if type(value) in (list, tuple) else deepcopy(value)
