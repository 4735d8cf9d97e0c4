"""A step that is run again in smaller parts where memory lacks, with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.data import BatchInfo, PendingBatch
from drivetrain.data.rows import pick_rows
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.memory import Attempt, attempt_together
from drivetrain.runtime.nested import batch_size_or_none
from drivetrain.runtime.seeds import RandomState
from drivetrain.runtime.timing import FORWARD
from drivetrain.strategies.capabilities import RepeatableStep
from drivetrain.trainer.hooks import Hooks
from drivetrain.trainer.loops.stand_in import presence_of
from drivetrain.trainer.loops.step import PlainStep, clear_gradients
from drivetrain.trainer.metrics.held_back import HeldBack
from drivetrain.trainer.metrics.metric_states import (
    find_metrics,
    metric_states,
    restore_metric_states,
    untouched_metrics,
)
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

PATIENCE = 60.0
"""Seconds that a process without memory waits for the others to end the same gradients."""

WHAT = "the gradients of a step"


class _Part(NamedTuple):
    """Some rows of a micro-batch.

    Attributes:
        place: Which micro-batch of the window it is a part of.
        first: Its first row.
        end: The row that follows its last one.
        of: The rows of the micro-batch; 0 where it has none that can be found, and is whole.
    """

    place: int
    first: int
    end: int
    of: int

    @property
    def share(self) -> float:
        """Its share of the micro-batch."""
        return (self.end - self.first) / self.of if self.of else 1.0


class SplitStep(PlainStep):
    """The step of a Trainer with `auto_micro_batch`.

    All of its gradients are computed before anything is exchanged. Where memory lacks for that on any process, all of
    them put back what has changed, cut each micro-batch in twice as many parts along its rows, and compute again. Then
    the gradients are averaged over processes, and what was logged is taken, once for each micro-batch.

    The hooks around batches are called once for each micro-batch: those before them all at the start.

    Args:
        trainer: The trainer.
        task: Its task.
        model: What the strategy made of the task.
        hooks: The overridden hooks.
    """

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        capable = trainer.strategy.capability(RepeatableStep)
        assert capable is not None  # refused before
        super().__init__(trainer, task, trainer.strategy.view(model, "manual"), hooks)
        self._repeatable: RepeatableStep = capable
        self._whole_model = model
        self._metrics, self._kept_buffers = find_metrics(task), list(task.buffers())
        self._held_back = HeldBack(self._logged)
        self._own_weight: Tensor | float | None = None
        self._tried = 0  # in how many parts a step was computed last

    def run(self, window: list[PendingBatch]) -> bool:
        """Run one step, in as many parts as memory has needed so far, or in more."""
        for micro_batch in window:
            self._show(micro_batch)
            self._announce(micro_batch)
        if not self._clears_first:
            self._zero_grad()
        decides = self._trainer.world_size > 1 and self._engine.weights.in_use is None
        outputs = self._compute(window)
        self._repeatable.reduce(self._whole_model)
        if decides:
            self._agree_on_weights()
        for number, micro_batch in enumerate(window):
            self._show(micro_batch)
            self._held_back.log(number)
            if self._on_batch_end and micro_batch is not window[-1]:
                self._end_batch(outputs[number], micro_batch)
        self._held_back.clear()
        stepped = self._engine.step_all() if self._has_loss() else self._counts_anyway(window)
        if decides and self._is_weighted:
            self._engine.weights.decide(self._own_weight)
        return self._finish(window, outputs[-1], stepped)

    def _show(self, micro_batch: PendingBatch) -> None:
        """Let hooks and logged values see a micro-batch as a whole."""
        self._current.batch, self._current.batch_info = micro_batch.batch, micro_batch.info
        self._logged.skips = self._share(micro_batch) == 0.0

    def _share(self, micro_batch: PendingBatch) -> float:
        return 1.0 if self._shards == 1 else micro_batch.info.share(self._shards)

    # gradients

    def _compute(self, window: Sequence[PendingBatch]) -> list[Any]:
        """Compute gradients until memory is enough. Returns what the task returned for each micro-batch."""
        random, metrics = RandomState.capture(), metric_states(self._metrics)
        buffers = [buffer.detach().clone() for buffer in self._kept_buffers]
        failed: Attempt | None = None
        while True:
            call = partial(self._gradients, window, None if failed is None else failed.failure)
            made = attempt_together(call, WHAT, PATIENCE, releases=failed is not None)
            if made.enough:
                outputs: list[Any] = made.result
                return outputs
            failed = made
            clear_gradients(self._optimizers, presence_of(self._whole_model))
            random.restore()
            with torch.no_grad():
                for buffer, kept in zip(self._kept_buffers, buffers, strict=True):
                    buffer.copy_(kept)
            restore_metric_states(self._task, metrics)
            self._progress.parts *= 2
            self._report()

    def _gradients(self, window: Sequence[PendingBatch], failure: MemoryError | None) -> list[Any]:
        """Compute the gradients of a step, part by part.

        Args:
            window: Its micro-batches.
            failure: That memory lacked on this process for larger parts.
        """
        parts = [part for place, each in enumerate(window) for part in self._cut(place, each)]
        if failure is not None and len(parts) == self._tried:
            raise ConfigurationError(_too_large(any(part.of for part in parts)), code="DT-104") from failure
        self._tried = len(parts)
        self._held_back.clear()
        self._begin(parts)  # type: ignore[arg-type]  # only their number counts
        outputs: list[list[tuple[float, Any]]] = [[] for _ in window]
        for part in parts:
            micro_batch = window[part.place]
            share = self._share(micro_batch)
            with self._held_back.collecting(part.place):
                output = self._run_part(_taken(micro_batch, part), share, part.share * len(parts) / len(window))
            outputs[part.place].append((part.share, output))
        return [_together(each, bool(self._is_weighted)) for each in outputs]

    def _cut(self, place: int, micro_batch: PendingBatch) -> list[_Part]:
        rows = micro_batch.info.rows or batch_size_or_none(micro_batch.batch) or 0
        count = min(self._progress.parts, rows)
        if count <= 1:
            return [_Part(place, 0, rows, rows)]
        ends = [rows * number // count for number in range(count + 1)]
        return [_Part(place, first, end, rows) for first, end in pairwise(ends)]

    def _run_part(self, taken: PendingBatch, share: float, part: float) -> Any:
        """Forward and backward of some rows; `part` of their micro-batch, which counts for `share`."""
        self._current.batch, self._current.batch_info = taken.batch, taken.info
        self._logged.skips = share == 0.0
        if self._engine.window.size > 1:
            self._engine.window.advance_planned()
        timing, given = self._timing, (taken.batch, taken.batch_idx)
        with nullcontext() if share else untouched_metrics(self._task):
            step = self._training_step
            output = timing.call(FORWARD, step, *given) if timing.on else step(*given)
        loss = output if isinstance(output, Tensor) else self._output.loss_of(output)
        if loss is not None:
            self._has_gradients = True  # they were cleared before
            self._differentiate(loss, output, share * part)
        return output

    # weights

    def _decide_weighted(self, output: Any) -> bool | None:
        """Whether losses come with weights, as this process has it: none may wait for another one here."""
        if self._trainer.world_size == 1:
            return super()._decide_weighted(output)
        if self._stand_in is not None and self._stand_in.stood_in:
            return None
        self._own_weight = output["weight"] if self._output.has_weight(output) else None
        self._engine.weights.in_use = self._own_weight is not None
        return self._engine.weights.in_use

    def _agree_on_weights(self) -> None:
        """Find out, after the first gradients, whether any process has losses with weights."""
        topology, weights = self._trainer.strategy.topology, self._engine.weights
        flag = torch.tensor(float(self._own_weight is not None), device=topology.device)
        in_use = bool(topology.sum(flag) > 0)
        if in_use and not self._is_weighted:
            weights.expect()
        self._is_weighted = weights.in_use = in_use

    # words

    def _report(self) -> None:
        """Print what has happened, on the main process."""
        normed = [name for name, module in self._task.named_modules() if isinstance(module, _BatchNorm)]
        statistics = ""
        if normed:
            statistics = (
                f" What cannot be the same are the batch statistics of {', '.join(normed[:3])}"
                f"{' and others' if normed[3:] else ''}: they are those of each part."
            )
        self._trainer.print(
            f"Step {self._progress.global_step}: memory lacks, so from now on each batch is computed in "
            f"{self._progress.parts} parts, one after the other. The global batch, its gradients and what is logged "
            f"stay the same.{statistics}"
        )


def _taken(micro_batch: PendingBatch, part: _Part) -> PendingBatch:
    """The rows of a part, as a micro-batch of its own."""
    if not part.of or part.share == 1.0:
        return micro_batch
    info, rows = micro_batch.info, part.end - part.first
    padding = max(0, min(rows, part.end - (part.of - info.padding)))
    cut = BatchInfo(info.index, rows, padding, info.global_rows, info.last, info.consumed)
    batch = pick_rows([micro_batch.batch], [part.of], range(part.first, part.end))
    taken = PendingBatch(batch, cut)
    taken.batch_idx = micro_batch.batch_idx
    return taken


def _together(outputs: Sequence[tuple[float, Any]], sums: bool) -> Any:
    """What a task would have returned for a whole micro-batch, from what it returned for its parts.

    Args:
        outputs: For each part, its share of the micro-batch, and what was returned.
        sums: Whether losses are sums, which come with weights.
    """
    if len(outputs) == 1:
        return outputs[0][1]
    given = [(share, output) for share, output in outputs if output is not None]
    if not given:
        return None
    last = given[-1][1]
    losses = [(output if isinstance(output, Tensor) else output["loss"]).detach() for _, output in given]
    loss = torch.stack([each * (1.0 if sums else share) for each, (share, _) in zip(losses, given, strict=True)]).sum()
    if isinstance(last, Tensor):
        return loss
    together = {**last, "loss": loss}
    if sums:
        together["weight"] = sum(output["weight"] for _, output in given)
    return together


def _too_large(has_rows: bool) -> str:
    if not has_rows:
        return (
            "Memory lacks for a step, and auto_micro_batch cannot cut its batch: no tensor in it shows how many rows "
            "it has. Give batches of tensors whose first dimension is the rows, or a smaller batch size."
        )
    return (
        "Memory lacks for a step even where each row is computed by itself, so auto_micro_batch cannot help. Make the "
        "model smaller, or use more devices."
    )
