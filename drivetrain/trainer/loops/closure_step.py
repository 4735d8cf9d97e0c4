"""The step of a task whose optimizer computes the gradients, by a closure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.data import PendingBatch
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.loops.step import PlainStep


class StepVetoed(Exception):
    """The step is left out, although an optimizer has begun it."""


class StepWithoutLoss(StepVetoed):
    """The same, where all batches were left out."""


class ClosureStep(PlainStep):
    """Lets the task's own `optimizer_step`, or an optimizer such as L-BFGS, decide when gradients are computed."""

    _keeps_window = True
    _announced: PendingBatch | None = None
    _repeats = False  # whether the closure runs the window's micro-batches once more

    def run(self, window: list[PendingBatch]) -> bool:
        """Run one step; the closure may run the micro-batches several times, their batch hooks once."""
        self._begin(window)
        self._current.batch, self._current.batch_info = window[0].batch, window[0].info
        self._announced, self._repeats = None, False
        self._announce(window[0])
        self._announced = window[0]
        outputs: list[Any] = []
        stepped = self._run_optimizers(window, outputs)
        if not outputs:
            raise ConfigurationError(
                f"The closure hasn't been executed: {type(self._task).__name__}.optimizer_step never ran its "
                "optimizer_closure, so no loss was computed. Call optimizer.step(closure=optimizer_closure), or "
                "optimizer_closure() yourself.",
                code="DT-083",
            )
        self._announced, self._repeats = None, False
        return self._finish(window, outputs[-1], stepped)

    def _run_optimizers(self, window: Sequence[PendingBatch], outputs: list[Any]) -> bool:
        stepped = False
        for position, optimizer in enumerate(self._trainer.task_optimizers):

            def compute_gradients(position: int = position) -> Any:
                if position == 0 or not outputs:
                    self._compute(window, outputs)
                return self._loss_of_window(outputs, window)

            self._engine.steps_taken = 0
            try:
                self._task.optimizer_step(
                    self._trainer.current_epoch, window[-1].batch_idx, optimizer, compute_gradients
                )
            except StepWithoutLoss:
                return stepped or self._counts_anyway(window)
            except StepVetoed:
                return stepped
            stepped = stepped or self._engine.steps_taken > 0
        return stepped

    def _compute(self, window: Sequence[PendingBatch], outputs: list[Any]) -> None:
        self._begin(window)
        self._repeats = bool(outputs)
        outputs[:] = self._forward_backward(self._model, self.run_micro_batch, window)
        if not self._has_loss():
            raise StepWithoutLoss
        self._engine.finish_gradients()
        if self._engine.is_vetoed():
            raise StepVetoed

    def _announce(self, micro_batch: PendingBatch) -> None:
        if not self._repeats and micro_batch is not self._announced:
            super()._announce(micro_batch)

    def _end_batch(self, output: Any, micro_batch: PendingBatch) -> None:
        if not self._repeats:
            super()._end_batch(output, micro_batch)

    def _loss_of_window(self, outputs: list[Any], window: Sequence[PendingBatch]) -> Tensor:
        """The loss that the gradients of a window are those of; this process's part of it where there are several."""
        total = torch.zeros((), device=self._trainer.strategy.topology.device)
        for output, micro_batch in zip(outputs, window, strict=True):
            loss = self._output.loss_of(output)
            if loss is not None:
                share = 1.0 if self._shards == 1 else micro_batch.info.share(self._shards)
                total = total + loss.detach() * (share / len(window))
        return total
