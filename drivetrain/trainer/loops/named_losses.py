"""The step of a task that returns a loss for each of its optimizers, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from drivetrain.accelerator.prepared import parameters_of
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.trainer.hooks import Hooks
from drivetrain.trainer.loops.stand_in import StandIn
from drivetrain.trainer.loops.step import PlainStep
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class NamedLossesStep(PlainStep):
    """Gives the gradients of each loss to the parameters of the optimizer of its name, and to no others.

    All losses are those of one forward, before any optimizer steps; then all step.

    Args:
        trainer: The trainer.
        task: Its task, whose `configure_optimizers` names its optimizers.
        model: What the strategy made of the task: the module to call.
        hooks: The overridden hooks.
    """

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        self._names = trainer.task_run.optimizer_names
        super().__init__(trainer, task, model, hooks)
        self._placed = trainer.task_run.model
        self._gradients = trainer.strategy.gradients

    def _choose_stand_in(self, model: nn.Module) -> StandIn | None:
        if self._trainer.world_size == 1:
            return None
        return StandIn(self._trainer.strategy, self._task, model, self._names)

    def _loss_of(self, output: Any) -> Any:
        if output is None:
            return None
        given = output if isinstance(output, Mapping) else {}
        missing = [name for name in self._names if not isinstance(given.get(name), Tensor)]
        if not missing:
            return output
        shown = f"a dict with the keys {sorted(map(str, given))}" if given else f"a {type(output).__name__}"
        raise ConfigurationError(
            f"{type(self._task).__name__}.training_step returned {shown}, without a loss for the optimizer "
            f"{missing[0]!r}.{nearest(missing[0], map(str, given))} Return a scalar tensor for each of "
            f"{', '.join(map(repr, self._names))} in every step, or None to leave the batch out. For optimizers that "
            "step at different times, set automatic_optimization = False.",
            code="DT-083",
        )

    def _run_backward(self, loss: Any, output: Any, share: float, stands_in: bool) -> None:
        if isinstance(output, Tensor):
            self._loss_of(output)  # refuses it
        losses = []
        for number, (name, optimizer) in enumerate(zip(self._names, self._optimizers, strict=True)):
            trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
            leaves = self._gradients.leaves(self._placed, trained)  # type: ignore[arg-type]
            if number == 0 and self._stand_in is not None:
                leaves += self._stand_in.leaves
            self._output.explain(output[name])
            losses.append((output[name], leaves))
        self._engine.backward_each([each for each in losses if each[1]], share)


def refuse_named(trainer: Trainer, task: Task, by_closure: bool) -> None:
    """Refuse what cannot give each loss to its own optimizer.

    Args:
        trainer: The trainer.
        task: Its task, whose `configure_optimizers` names its optimizers.
        by_closure: Whether an optimizer or the task's `optimizer_step` takes a closure.

    Raises:
        ConfigurationError: Names what, and why.
    """
    names = ", ".join(map(repr, trainer.task_run.optimizer_names))
    reason = ""
    if trainer.strategy.schedules_microbatches:
        reason = f"{trainer.strategy!r} runs the backwards of all micro-batches by itself, each from one loss"
    elif by_closure:
        reason = "an optimizer that needs a closure, or optimizer_step, takes one loss"
    if reason:
        raise ConfigurationError(
            f"{type(task).__name__}.configure_optimizers names its optimizers ({names}), each for a loss of its own, "
            f"but {reason}. Return a list of optimizers for one loss, or set automatic_optimization = False where the "
            "strategy takes it.",
            code="DT-086",
        )
