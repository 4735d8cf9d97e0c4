"""Optimizer steps with closures, named losses, a pipeline schedule or split batches, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.accelerator.prepared import parameters_of
from drivetrain.accelerator.step import StepHooks
from drivetrain.data import BatchInfo, PendingBatch
from drivetrain.data.sharding import pick_rows
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.memory import Attempt, attempt_together
from drivetrain.runtime.pytrees import batch_size_or_none, send_to_device
from drivetrain.runtime.seeds import RandomState
from drivetrain.runtime.timing import FORWARD
from drivetrain.strategies.base import average_gradients
from drivetrain.trainer.hooks import Hooks, is_overridden
from drivetrain.trainer.loops.step import (
    DummyLoss,
    ManualStep,
    PlainStep,
    clear_gradients,
    detached,
    muted_logging,
    presence_parameter,
)
from drivetrain.trainer.metrics.logged_values import MicroBatchLog
from drivetrain.trainer.metrics.metric_sync import find_metrics, metric_states, restore_metric_states, untouched_metrics
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


# Steps with a closure


class StepVetoed(Exception):
    """Exception that aborts an optimizer step because a callback rejects the gradients."""


class StepWithoutLoss(StepVetoed):
    """Exception that aborts an optimizer step because `training_step` returned no loss on any rank."""


class ClosureStep(PlainStep):
    """Performs training steps with an optimizer that calls a closure, such as L-BFGS."""

    _keeps_window = True
    _announced: PendingBatch | None = None
    _repeats = False  # True from the closure's second call on, whose batch hooks are skipped

    def run(self, window: list[PendingBatch]) -> bool:
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
                return stepped or self._trainer.steps_without_loss(window) > 0
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
        total = torch.zeros((), device=self._trainer.strategy.topology.device)
        for output, micro_batch in zip(outputs, window, strict=True):
            loss = self._output.loss_of(output)
            if loss is not None:
                share = 1.0 if self._shards == 1 else micro_batch.info.share(self._shards)
                total = total + loss.detach() * (share / len(window))
        return total


# Steps with one loss per optimizer


class NamedLossesStep(PlainStep):
    """Runner of optimizer steps for tasks whose `training_step` returns a dict with one loss per optimizer.

    Each loss gives gradients only to the parameters of its optimizer. All losses come from one forward, and all
    backwards run before the first optimizer steps.
    """

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        self._names = trainer.task_run.optimizer_names
        super().__init__(trainer, task, model, hooks)

    def _choose_dummy_loss(self) -> DummyLoss | None:
        trainer = self._trainer
        if trainer.world_size == 1:
            return None
        return DummyLoss(trainer.strategy, self._task, trainer.task_run.model, self._names)

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
            f"{', '.join(map(repr, self._names))} in every step, or None to skip the batch. For optimizers that "
            "step at different times, set automatic_optimization = False.",
        )

    def _run_backward(self, loss: Any, output: Any, share: float, is_dummy: bool) -> None:
        if isinstance(output, Tensor):
            self._loss_of(output)  # raises: a single tensor has no names
        losses = []
        for number, (name, optimizer) in enumerate(zip(self._names, self._optimizers, strict=True)):
            trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
            inputs: list[Tensor] = [*trained]
            if number == 0 and self._dummy_loss is not None:
                inputs += self._dummy_loss.leaves
            self._output.explain(output[name])
            losses.append((output[name], inputs))
        self._engine.backward_each([each for each in losses if each[1]], share)


def refuse_named(trainer: Trainer, task: Task, by_closure: bool) -> None:
    names = ", ".join(map(repr, trainer.task_run.optimizer_names))
    reason = ""
    if trainer.strategy.schedules_microbatches:
        reason = f"{trainer.strategy!r} runs the backward of each micro-batch itself, from a single loss"
    elif by_closure:
        reason = "an optimizer that needs a closure, or an overridden optimizer_step, uses a single loss"
    if reason:
        raise ConfigurationError(
            f"{type(task).__name__}.configure_optimizers names its optimizers ({names}), so each has its own loss, "
            f"but {reason}. Return a list of optimizers that share one loss, or set automatic_optimization = False if "
            "the strategy supports it.",
        )


# Steps under a pipeline schedule


class ScheduledStep(PlainStep):
    """Performs training steps with strategies that order the forward and backward passes, as pipelines do.

    Only the ranks of the last pipeline stage finish `training_step`. All other ranks receive its outputs and logged
    values.
    """

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        super().__init__(trainer, task, model, hooks)
        self._strategy = trainer.strategy
        self._after_backward = hooks.find("on_after_backward")

    def _step_hooks(self, hooks: Hooks) -> StepHooks:
        # The strategy runs all backwards at once, so `_end_backwards` calls these hooks afterwards.
        return replace(super()._step_hooks(hooks), after_backward=())

    def _choose_dummy_loss(self) -> DummyLoss | None:
        return None

    def run(self, window: list[PendingBatch]) -> bool:
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
        # With `probe`, only the forward runs.
        self._enter(micro_batch)
        batch, index, info = micro_batch.batch, micro_batch.batch_idx, micro_batch.info
        if probe:
            with muted_logging(self._logged, self._task):
                return self._training_step(batch, index)
        if self._engine.window.size > 1:
            self._engine.window.advance_planned()
        share = 1.0 if self._shards == 1 else info.share(self._shards)
        timing, step = self._timing, self._no_step if batch is None else self._training_step
        with nullcontext() if share else muted_logging(self._logged, self._task):
            output = timing.call(FORWARD, step, batch, index) if timing.on else step(batch, index)
        loss = self._output.loss_of(output)
        if loss is not None:
            self._differentiate(loss, output, share)
        return output

    def _decide_weighted(self, output: Any) -> bool:
        weighted = self._output.has_weight(output)  # other ranks read it from the shared outputs
        self._engine.weights.in_use = weighted
        return weighted


def refuse_unscheduled(task: Task, strategy: object, by_closure: bool) -> None:
    # A pipeline strategy runs the forward and backward of all micro-batches itself.
    if task.automatic_optimization and not by_closure:
        return
    what = "a closure for an optimizer or an overridden optimizer_step" if by_closure else "manual optimization"
    raise ConfigurationError(
        f"{strategy!r} runs the forward and backward of all micro-batches itself, so {type(task).__name__} cannot use "
        f"{what}. Use automatic optimization and an optimizer without a closure, or another strategy.",
    )


# Steps that are split after running out of memory


PATIENCE = 60.0
"""Seconds that a rank out of memory waits for the other ranks to finish their gradients."""

WHAT = "the gradients of a step"


class _Part(NamedTuple):
    place: int  # index of the micro-batch within the optimizer step
    first: int
    end: int  # index after the last row
    of: int  # rows of the micro-batch, or 0 if unknown: it is not split

    @property
    def share(self) -> float:
        return (self.end - self.first) / self.of if self.of else 1.0


class SplitStep(PlainStep):
    """Performs training steps on batches that are split into ever smaller parts until each part fits into memory.

    Used with `Trainer(auto_micro_batch=True)`. If any rank runs out of memory, all ranks restore their state, double
    the number of parts and start the step again. Gradients are averaged over ranks only after all of them succeed.
    Logged values then count once per micro-batch.

    `on_train_batch_start` runs for all micro-batches before the first forward.
    """

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        super().__init__(trainer, task, trainer.strategy.view(model, "manual"), hooks)
        self._metrics, self._kept_buffers = find_metrics(task), list(task.buffers())
        self._log_of_parts = MicroBatchLog(self._logged)
        self._own_weight: Tensor | float | None = None
        self._tried = 0  # number of parts in the last attempt

    def run(self, window: list[PendingBatch]) -> bool:
        for micro_batch in window:
            self._show(micro_batch)
            self._announce(micro_batch)
        if not self._clears_first:
            self._zero_grad()
        decides = self._trainer.world_size > 1 and self._engine.weights.in_use is None
        outputs = self._compute(window)
        # Only now: a rank that is out of memory could not take part in an all-reduce during the backward.
        average_gradients([each for each in self._model.parameters() if each.requires_grad])
        if decides:
            self._agree_on_weights()
        for number, micro_batch in enumerate(window):
            self._show(micro_batch)
            self._log_of_parts.log(number)
            if self._on_batch_end and micro_batch is not window[-1]:
                self._end_batch(outputs[number], micro_batch)
        self._log_of_parts.clear()
        stepped = self._engine.step_all() if self._has_loss() else self._trainer.steps_without_loss(window)
        if decides and self._is_weighted:
            self._engine.weights.decide(self._own_weight)
        return self._finish(window, outputs[-1], stepped)

    def _show(self, micro_batch: PendingBatch) -> None:
        self._current.batch, self._current.batch_info = micro_batch.batch, micro_batch.info
        self._logged.skips = self._share(micro_batch) == 0.0

    def _share(self, micro_batch: PendingBatch) -> float:
        return 1.0 if self._shards == 1 else micro_batch.info.share(self._shards)

    # Gradients

    def _compute(self, window: Sequence[PendingBatch]) -> list[Any]:
        # Each attempt that runs out of memory is followed by one with twice as many parts.
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
            clear_gradients(self._optimizers, presence_parameter(self._model))
            # Dropout masks and batch norm statistics of the failed attempt must not affect the next one.
            random.restore()
            with torch.no_grad():
                for buffer, kept in zip(self._kept_buffers, buffers, strict=True):
                    buffer.copy_(kept)
            restore_metric_states(self._task, metrics)
            self._progress.parts *= 2
            self._report()

    def _gradients(self, window: Sequence[PendingBatch], failure: MemoryError | None) -> list[Any]:
        # `failure` is the error of the previous attempt.
        parts = [part for place, each in enumerate(window) for part in self._cut(place, each)]
        # More parts were asked for, but each part already consists of a single row.
        if failure is not None and len(parts) == self._tried:
            raise ConfigurationError(_too_large(any(part.of for part in parts)), see="big-models.md") from failure
        self._tried = len(parts)
        self._log_of_parts.clear()
        self._begin(parts)  # type: ignore[arg-type]  # only their number counts
        outputs: list[list[tuple[float, Any]]] = [[] for _ in window]
        for part in parts:
            micro_batch = window[part.place]
            share = self._share(micro_batch)
            with self._log_of_parts.collecting(part.place):
                output = self._run_part(_taken(micro_batch, part), share, part.share * len(parts) / len(window))
            outputs[part.place].append((part.share, output))
        return [_combine_outputs(each, bool(self._is_weighted)) for each in outputs]

    def _cut(self, place: int, micro_batch: PendingBatch) -> list[_Part]:
        rows = micro_batch.info.rows or batch_size_or_none(micro_batch.batch) or 0
        count = min(self._progress.parts, rows)
        if count <= 1:
            return [_Part(place, 0, rows, rows)]
        ends = [rows * number // count for number in range(count + 1)]
        return [_Part(place, first, end, rows) for first, end in pairwise(ends)]

    def _run_part(self, taken: PendingBatch, share: float, part: float) -> Any:
        # `share` weighs the whole micro-batch in the mean over all ranks, `part` these rows in the step of this rank.
        self._current.batch, self._current.batch_info = taken.batch, taken.info
        self._logged.skips = share == 0.0
        if self._engine.window.size > 1:
            self._engine.window.advance_planned()
        timing, given = self._timing, (taken.batch, taken.batch_idx)
        with nullcontext() if share else untouched_metrics(self._task):
            step = self._no_step if taken.batch is None else self._training_step
            output = timing.call(FORWARD, step, *given) if timing.on else step(*given)
        loss = output if isinstance(output, Tensor) else self._output.loss_of(output)
        if loss is not None:
            self._has_gradients = True  # `run` has cleared them; clearing here would drop the earlier parts
            self._differentiate(loss, output, share * part)
        return output

    # Weights

    def _decide_weighted(self, output: Any) -> bool | None:
        # Unlike the inherited method, this one runs no collective: a rank that is out of memory would not take part.
        if self._trainer.world_size == 1:
            return super()._decide_weighted(output)
        if self._dummy_loss is not None and self._dummy_loss.was_dummy:
            return None
        self._own_weight = output["weight"] if self._output.has_weight(output) else None
        self._engine.weights.in_use = self._own_weight is not None
        return self._engine.weights.in_use

    def _agree_on_weights(self) -> None:
        # Runs an all-reduce. The losses of all ranks are weighted if that of any rank has a weight.
        topology, weights = self._trainer.strategy.topology, self._engine.weights
        flag = torch.full((), float(self._own_weight is not None), device=topology.device)
        in_use = bool(topology.sum(flag) > 0)
        if in_use and not self._is_weighted:
            weights.expect()
        self._is_weighted = weights.in_use = in_use

    # Messages

    def _report(self) -> None:
        normed = [name for name, module in self._task.named_modules() if isinstance(module, _BatchNorm)]
        statistics = ""
        if normed:
            statistics = (
                f" Only the batch statistics of {', '.join(normed[:3])}"
                f"{' and others' if normed[3:] else ''} change, since they are computed for each part."
            )
        self._trainer.announce(
            f"Step {self._progress.global_step}: out of memory. From now on, each batch is processed in "
            f"{self._progress.parts} parts, one after the other. The global batch, its gradients and the logged values "
            f"stay the same.{statistics}"
        )


def _taken(micro_batch: PendingBatch, part: _Part) -> PendingBatch:
    if not part.of or part.share == 1.0:
        return micro_batch
    info, rows = micro_batch.info, part.end - part.first
    # Padding rows are the last rows of the micro-batch.
    padding = max(0, min(rows, part.end - (part.of - info.padding)))
    cut = BatchInfo(info.index, rows, padding, info.global_rows, info.last, info.consumed)
    batch = pick_rows([micro_batch.batch], [part.of], range(part.first, part.end))
    taken = PendingBatch(batch, cut)
    taken.batch_idx = micro_batch.batch_idx
    return taken


def _combine_outputs(outputs: Sequence[tuple[float, Any]], sums: bool) -> Any:
    # Losses with weights are summed (`sums`), others averaged. None if the task skipped all parts.
    if len(outputs) == 1:
        return outputs[0][1]
    given = [(share, output) for share, output in outputs if output is not None]
    if not given:
        return None
    last = given[-1][1]
    losses = [(output if isinstance(output, Tensor) else output["loss"]).detach() for _, output in given]
    # Sums of losses add up over the parts. Means are weighted by each part's share of the rows.
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
            "Out of memory in a step. auto_micro_batch cannot split the batch, because no tensor in it shows its "
            "number of rows. Use batches of tensors whose first dimension is the rows, or a smaller batch size."
        )
    return (
        "Out of memory in a step, even with each row processed by itself, so auto_micro_batch cannot help. Make the "
        "model smaller, or use more devices."
    )


def choose_step(trainer: Trainer, task: Task, model: nn.Module, splits: bool = True) -> PlainStep:
    by_closure = task.automatic_optimization and (
        is_overridden(task, Task, "optimizer_step") or any(o.needs_closure for o in trainer.task_optimizers)
    )
    splits = splits and trainer.auto_micro_batch
    if splits and (by_closure or trainer.task_run.optimizer_names or not task.automatic_optimization):
        raise ConfigurationError(
            f"Trainer(auto_micro_batch=True) does not support {type(task).__name__}, because it uses manual "
            "optimization, overrides optimizer_step, has an optimizer that needs a closure, or returns one loss per "
            "optimizer. Remove auto_micro_batch, and use a smaller batch size.",
        )
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
