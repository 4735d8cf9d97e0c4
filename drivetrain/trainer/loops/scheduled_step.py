"""The step of a task whose micro-batches the strategy interleaves, as a pipeline does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.accelerator.step import StepHooks
from drivetrain.data import PendingBatch
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import send_to_device
from drivetrain.runtime.timing import FORWARD
from drivetrain.trainer.hooks import Hooks
from drivetrain.trainer.loops.binding import muted_logging
from drivetrain.trainer.loops.stand_in import StandIn
from drivetrain.trainer.loops.step import PlainStep
from drivetrain.trainer.loops.step_output import detached
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class ScheduledStep(PlainStep):
    """Runs all micro-batches at once, with the hooks of batches around them.

    Only some processes run the task's step; all see what it returned and logged.

    Raises:
        ConfigurationError: The task runs forward and backward by itself.
    """

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        super().__init__(trainer, task, model, hooks)
        self._strategy = trainer.strategy
        self._after_backward = hooks.find("on_after_backward")

    def _step_hooks(self, hooks: Hooks) -> StepHooks:
        return replace(super()._step_hooks(hooks), after_backward=())

    def _choose_stand_in(self, model: nn.Module) -> StandIn | None:
        return None

    def run(self, window: list[PendingBatch]) -> bool:
        """Run one step."""
        self._begin(window)
        strategy, logged = self._strategy, self._logged
        for micro_batch in window:
            self._enter(micro_batch)
            self._announce(micro_batch)
        self._has_gradients = self._took_part = True
        if not self._clears_first:
            self._zero_grad()
        with logged.recorded() as calls:
            own = self._forward_backward(self._model, self.run_micro_batch, window)
        outputs: list[Any]
        outputs, calls = strategy.topology.share(([detached(output) for output in own], calls))
        if not strategy.topology.computes_loss:
            outputs = send_to_device(outputs, strategy.topology.device)
            logged.replay(calls, self._task)
            if any(self._output.has_weight(output) for output in outputs):
                self._is_weighted = self._engine.weights.in_use = True
                self._engine.weights.expect()
        self._end_backwards(window, outputs)
        self._enter(window[-1])
        return self._finish(window, outputs[-1], self._engine.step_all())

    def _enter(self, micro_batch: PendingBatch) -> None:
        self._current.batch, self._current.batch_info = micro_batch.batch, micro_batch.info

    def _end_backwards(self, window: Sequence[PendingBatch], outputs: list[Any]) -> None:
        for micro_batch in window:
            self._enter(micro_batch)
            for hook in self._after_backward:
                hook()
        if self._on_batch_end:
            for output, micro_batch in zip(outputs[:-1], window[:-1], strict=True):
                self._enter(micro_batch)
                self._end_batch(output, micro_batch)

    def run_micro_batch(self, micro_batch: PendingBatch, probe: bool = False) -> Any:
        """Forward and backward of one micro-batch.

        Args:
            micro_batch: The micro-batch.
            probe: Run the step only for the strategy to see what it calls the model with; nothing of it counts.
        """
        self._enter(micro_batch)
        batch, index, info = micro_batch.batch, micro_batch.batch_idx, micro_batch.info
        if probe:
            with muted_logging(self._logged, self._task):
                return self._training_step(batch, index)
        if self._engine.window.size > 1:
            self._engine.window.advance_planned()
        share = 1.0 if self._shards == 1 else info.share(self._shards)
        timing, step = self._timing, self._training_step
        with nullcontext() if share else muted_logging(self._logged, self._task):
            output = timing.call(FORWARD, step, batch, index) if timing.on else step(batch, index)
        loss = self._output.loss_of(output)
        if loss is not None:
            self._differentiate(loss, output, share)
        return output

    def _decide_weighted(self, output: Any) -> bool:
        weighted = self._output.has_weight(output)  # the processes without the last stage see it in the outputs
        self._engine.weights.in_use = weighted
        return weighted


def refuse_unscheduled(task: Task, strategy: object, by_closure: bool) -> None:
    """Refuse what has to run forward and backward by itself.

    Args:
        task: The task.
        strategy: The strategy, which runs them.
        by_closure: Whether an optimizer or the task's `optimizer_step` takes a closure.
    """
    if task.automatic_optimization and not by_closure:
        return
    what = "an optimizer that needs a closure, or optimizer_step" if by_closure else "manual optimization"
    raise ConfigurationError(
        f"{strategy!r} runs forward and backward of all micro-batches together, so {what} of {type(task).__name__} "
        "cannot run them. Use automatic optimization with an optimizer that needs none, or another strategy.",
        code="DT-051",
    )
