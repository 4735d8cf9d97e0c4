"""One optimizer step: forward and backward over its micro-batches, clip, step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerator import WeightedMean
from drivetrain.data import BatchInfo
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import send_to_device
from drivetrain.strategies import StepModule
from drivetrain.strategies.precision import Precision, overrides
from drivetrain.trainer.hooks import Hooks, is_overridden
from drivetrain.trainer.metrics.logged_values import LoggedValues
from drivetrain.trainer.metrics.metric_states import untouched_metrics
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

SKIP_EPOCH = -1


class MicroBatch(NamedTuple):
    """One batch on its way into a step.

    Attributes:
        batch: what the loader gave.
        batch_idx: its number in the epoch.
        info: what the loader knows about it.
    """

    batch: Any
    batch_idx: int
    info: BatchInfo


class EpochSkipped(Exception):
    """`on_train_batch_start` asked to leave out the rest of the epoch."""


class StepVetoed(Exception):
    """A callback asked to leave a step out, in the midst of a closure."""


class OptimizationStep:
    """Runs optimizer steps. All that can be decided before the loop is decided in the constructor.

    Args:
        trainer: the trainer.
        task: its task.
        model: what the strategy made of the task: the module to call.
        hooks: the overridden hooks.
    """

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        accelerator = trainer.accelerator
        strategy, precision = accelerator.strategy, accelerator.precision
        self._trainer, self._task, self._model = trainer, task, model
        self._optimizers = [optimizer.optimizer for optimizer in trainer.task_optimizers]
        self._precision = precision
        self._forward_backward = strategy.forward_backward
        self._optimizer_step = strategy.optimizer_step
        stands_in = trainer.world_size > 1 and task.automatic_optimization and not strategy.schedules_microbatches
        step = self._with_stand_in(task.training_step) if stands_in else task.training_step
        self._training_step = bind_step(model, step, precision)
        self._scale = precision.scale if overrides(precision, "scale") else None
        self._unscale = precision.unscale if overrides(precision, "unscale") else None
        self._backward = task.backward if is_overridden(task, Task, "backward") else strategy.backward
        self._zero_grad = self._choose_zero_grad(hooks)
        self._clips = trainer.gradient_clip_val is not None or is_overridden(task, Task, "configure_gradient_clipping")
        # A loader that is not sharded gives each process a whole batch, which counts as it is.
        self._processes = strategy.data_shard.count if trainer.use_distributed_sampler else 1
        self._strategy, self._schedules_microbatches = strategy, strategy.schedules_microbatches
        self._weighted = WeightedMean(strategy)
        self._is_weighted: bool | None = None
        self._stood_in = False
        self._automatic = task.automatic_optimization
        self._by_closure = self._automatic and (
            is_overridden(task, Task, "optimizer_step") or any(o.needs_closure for o in trainer.task_optimizers)
        )
        self._on_batch_start = hooks.find("on_train_batch_start")
        self._on_batch_end = hooks.find("on_train_batch_end")
        self._on_before_backward = hooks.find("on_before_backward")
        self._on_after_backward = hooks.find("on_after_backward")
        self._on_gradients_ready = hooks.find("on_gradients_ready")
        self._on_before_step = hooks.find("on_before_optimizer_step")
        if self._schedules_microbatches:
            self._check_whole_window()
        self._window_size = 1
        self._remaining = 1
        self._has_gradients = False
        self._announces = True
        self._announced: MicroBatch | None = None
        self._stepped = False

    def run(self, window: Sequence[MicroBatch]) -> bool:
        """Run one step.

        Args:
            window: its micro-batches.

        Returns:
            Whether an optimizer stepped: not where all micro-batches were left out, or gradients overflowed.

        Raises:
            EpochSkipped: a hook asked to leave out the rest of the epoch.
        """
        self._window_size = self._remaining = len(window)
        self._has_gradients = False
        self._announces = True
        if self._is_weighted:
            self._weighted.discard()  # of a step that broke off
        if self._by_closure:
            outputs, stepped = self._run_by_closure(window)
        elif self._schedules_microbatches:
            outputs = self._run_whole_window(window)
            stepped = self._step_all()
        else:
            self._stepped = False
            outputs = self._forward_backward(self._model, self._run_microbatch, window)
            stepped = self._stepped if not self._automatic else self._has_gradients and self._step_all()
        trainer, progress = self._trainer, self._trainer.progress
        progress.batches_in_epoch = window[-1].batch_idx + 1
        progress.total_batches += len(window)
        if stepped:
            progress.global_step += 1
            if trainer.steps_schedulers:
                trainer.update_step_schedulers()
        if self._on_batch_end:
            self._end_batch(outputs[-1], window[-1])
        return stepped

    def mark_stepped(self) -> None:
        """Note that a task that optimizes by hand has stepped."""
        self._stepped = True

    def _run_whole_window(self, window: Sequence[MicroBatch]) -> list[Any]:
        """Run all micro-batches where the strategy interleaves them as it likes, with the batches' hooks around it.

        Only some processes run the task's step; all see what it returned and logged.
        """
        trainer, strategy = self._trainer, self._strategy
        for microbatch in window:
            trainer.current.batch, trainer.current.batch_info = microbatch.batch, microbatch.info
            self._announce(microbatch)
        self._announces = False
        self._has_gradients = True
        self._zero_grad()
        with trainer.logged.recorded() as calls:
            own_outputs = self._forward_backward(self._model, self._run_microbatch, window)
        outputs: list[Any]
        outputs, calls = strategy.share(([_detached(output) for output in own_outputs], calls))
        if not strategy.computes_loss:
            outputs = send_to_device(outputs, strategy.device)
            trainer.logged.replay(calls, self._task)
            self._is_weighted = any(isinstance(output, Mapping) and "weight" in output for output in outputs)
        for microbatch in window:
            trainer.current.batch, trainer.current.batch_info = microbatch.batch, microbatch.info
            for hook in self._on_after_backward:
                hook()
        for output, microbatch in zip(outputs[:-1], window[:-1], strict=True):
            trainer.current.batch, trainer.current.batch_info = microbatch.batch, microbatch.info
            self._end_batch(output, microbatch)
        trainer.current.batch, trainer.current.batch_info = window[-1].batch, window[-1].info
        return outputs

    def _run_microbatch(self, microbatch: MicroBatch, probe: bool = False) -> Any:
        """Forward and backward of one micro-batch, with the hooks around them.

        Args:
            microbatch: the micro-batch.
            probe: run the step only for a strategy to see what it calls the model with; nothing of it counts.
        """
        batch, index, info = microbatch
        trainer = self._trainer
        trainer.current.batch_info = info
        trainer.current.batch = batch
        if probe:
            return self._probed(batch, index)
        if self._on_batch_start and self._announces and microbatch is not self._announced:
            self._announce(microbatch)
        weight = 1.0 / self._window_size
        if self._processes > 1:
            weight *= self._share_of_rows(info)
        if weight:
            trainer.logged.skips = False
            output = self._training_step(batch, index)
        else:
            trainer.logged.skips = True
            with untouched_metrics(self._task):
                output = self._training_step(batch, index)
        if self._automatic:
            loss = output if isinstance(output, Tensor) else self._loss_of(output)
            if loss is not None:
                if self._is_weighted is None:
                    self._is_weighted = self._decide_weighted(output)
                if self._is_weighted:
                    loss = self._weighted.part(loss, self._weight_of(output), counts=weight != 0)
                else:
                    if loss is not output and "weight" in output:
                        self._refuse_weight()
                    loss = loss if weight == 1.0 else loss * weight
                self._backward_of(loss)
        self._remaining -= 1
        if self._on_batch_end and self._remaining and self._announces:
            self._end_batch(output, microbatch)
        return output

    def _announce(self, microbatch: MicroBatch) -> None:
        for hook in self._on_batch_start:
            if hook(microbatch.batch, microbatch.batch_idx) == SKIP_EPOCH:
                raise EpochSkipped

    def _backward_of(self, loss: Tensor) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            self._zero_grad()
        if self._scale is not None:
            loss = self._scale(loss)
        if self._on_before_backward:
            for hook in self._on_before_backward:
                hook(loss)
        try:
            self._backward(loss)
        except RuntimeError as error:
            self._explain(loss, error)
            raise
        if self._on_after_backward and not self._schedules_microbatches:
            for hook in self._on_after_backward:
                hook()

    def _step_all(self) -> bool:
        """Clip and step every optimizer. Returns whether none was skipped."""
        stepped = True
        if self._is_weighted:
            self._weighted.finish([(self._model, self._optimizers)])
        if self._on_gradients_ready and self._is_vetoed():
            return False
        for optimizer in self._optimizers:
            if self._on_before_step or self._clips:
                self.before_step(optimizer)
            stepped = self._optimizer_step(optimizer, self._precision) and stepped
        return stepped

    def _is_vetoed(self) -> bool:
        """Whether a callback wants the step left out. All are asked: they may talk to their peers."""
        verdicts = [hook() for hook in self._on_gradients_ready]
        return any(verdict is False for verdict in verdicts)

    def before_step(self, optimizer: Optimizer) -> None:
        """Bring gradients to their true size, call the hooks, and clip."""
        if self._unscale is not None:
            self._unscale(optimizer)
        for hook in self._on_before_step:
            hook(optimizer)
        if self._clips and self._automatic:
            trainer = self._trainer
            self._task.configure_gradient_clipping(
                optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )

    def _run_by_closure(self, window: Sequence[MicroBatch]) -> tuple[list[Any], bool]:
        """Let the task's own `optimizer_step`, or an optimizer such as L-BFGS, decide when gradients are computed."""
        outputs: list[Any] = []
        before = self._trainer.progress.global_step
        stepped = False
        self._trainer.current.batch, self._trainer.current.batch_info = window[0].batch, window[0].info
        self._announce(window[0])
        self._announced = window[0]
        for position, optimizer in enumerate(self._trainer.task_optimizers):

            def compute_gradients(optimizer: Any = optimizer, position: int = position) -> Any:
                if position == 0 or not outputs:
                    self._has_gradients = False
                    self._remaining = len(window)
                    outputs[:] = self._forward_backward(self._model, self._run_microbatch, window)
                    self._announces = False
                    if self._is_weighted:
                        self._weighted.finish([(self._model, self._optimizers)])
                    if self._on_gradients_ready and self._is_vetoed():
                        raise StepVetoed
                self.before_step(optimizer.optimizer)
                loss = self._loss_of_window(outputs, window)
                # Searching along a line, every process must see the same.
                return reduce(loss) if optimizer.needs_closure else loss

            self._stepped = False
            try:
                self._task.optimizer_step(
                    self._trainer.current_epoch, window[-1].batch_idx, optimizer, compute_gradients
                )
            except StepVetoed:
                break
            stepped = stepped or (self._stepped and not optimizer.step_was_skipped)
        if not outputs:
            raise ConfigurationError(
                f"{type(self._task).__name__}.optimizer_step never ran its optimizer_closure, so no loss was computed. "
                "Call optimizer.step(closure=optimizer_closure), or optimizer_closure() yourself."
            )
        self._trainer.progress.global_step = before
        self._announces = True
        return outputs, stepped

    def _loss_of(self, output: Any) -> Tensor | None:
        if isinstance(output, Tensor):
            return output
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            loss: Tensor = output["loss"]
            return loss
        if output is None:
            return None
        given = f"a dict with the keys {sorted(map(str, output))}" if isinstance(output, Mapping) else repr(output)[:80]
        raise ConfigurationError(
            f"{type(self._task).__name__}.training_step returned {given}. Return the loss as a scalar tensor, a dict "
            "with it under 'loss', or None to leave the batch out."
        )

    def _decide_weighted(self, output: Any) -> bool:
        """Whether losses come with weights. All processes find out together, since a window ends with a collective."""
        weight = output.get("weight") if isinstance(output, Mapping) else None
        if self._schedules_microbatches:  # not all processes are here; the others are told with the outputs
            return weight is not None
        return self._weighted.decide(weight)

    def _weight_of(self, output: Any) -> Tensor | float:
        if isinstance(output, Mapping) and "weight" in output:
            weight: Tensor | float = output["weight"]
            return weight
        if self._stood_in:
            return 0.0
        raise ConfigurationError(
            f"{type(self._task).__name__}.training_step returned a loss without a weight, after one with a weight. "
            "Return {'loss': sum, 'weight': tokens} for every batch, or None to leave one out."
        )

    def _refuse_weight(self) -> None:
        raise ConfigurationError(
            f"{type(self._task).__name__}.training_step returned a loss with a weight, after one without. Return "
            "{'loss': sum, 'weight': tokens} for every batch, or for none."
        )

    def _explain(self, loss: Tensor, error: RuntimeError) -> None:
        """Say in other words what torch means where it cannot differentiate what `training_step` returned."""
        step = f"{type(self._task).__name__}.training_step"
        if loss.numel() != 1:
            raise ConfigurationError(
                f"{step} returned a tensor of shape {tuple(loss.shape)}. Return one number, such as loss.mean()."
            ) from error
        if not loss.requires_grad:
            raise ConfigurationError(
                f"{step} returned a loss that depends on no parameter that can be trained, so nothing can be learned "
                "from it. Compute it from the task's modules, without detach(), item() or no_grad(); or return None "
                "to leave the batch out."
            ) from error

    def _loss_of_window(self, outputs: list[Any], window: Sequence[MicroBatch]) -> Tensor:
        """The loss that the gradients of a window are those of; this process's part of it where there are several."""
        total = torch.zeros((), device=self._trainer.strategy.device)
        for output, microbatch in zip(outputs, window, strict=True):
            loss = self._loss_of(output)
            if loss is not None:
                total = total + loss.detach() * (self._share_of_rows(microbatch.info) / len(window))
        return total

    def _with_stand_in(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step whose peers wait for its gradients: a batch that it leaves out has gradients of zero instead.

        They must come from the output of the forward, by which DDP learns what takes part in the backward.
        """
        nothing = self._trainer.strategy.zero_loss

        def step_or_stand_in(*args: Any) -> Any:
            output = step(*args)
            self._stood_in = output is None
            return nothing(self._task) if self._stood_in else output

        return step_or_stand_in

    def _share_of_rows(self, info: BatchInfo) -> float:
        """What this process's mean loss counts for, so that the mean over processes is that of the global batch."""
        if self._processes == 1:
            return 1.0
        rows, total = info.real_rows, info.global_rows
        if rows is None or not total:
            return 1.0
        return rows * self._processes / total

    def _check_whole_window(self) -> None:
        """Refuse what needs to run forward and backward by itself."""
        if not self._automatic or self._by_closure:
            what = "an optimizer that needs a closure, or optimizer_step" if self._automatic else "manual optimization"
            raise ConfigurationError(
                f"{self._strategy!r} runs forward and backward of all micro-batches together, so {what} of "
                f"{type(self._task).__name__} cannot run them. Use automatic optimization with an optimizer that "
                "needs none, or another strategy."
            )

    def _probed(self, batch: Any, index: int) -> Any:
        with muted_logging(self._trainer.logged, self._task):
            return self._training_step(batch, index)

    def _end_batch(self, output: Any, microbatch: MicroBatch) -> None:
        outputs = _detached(output)
        for hook in self._on_batch_end:
            hook(outputs, microbatch.batch, microbatch.batch_idx)

    def _choose_zero_grad(self, hooks: Hooks) -> Callable[[], None]:
        """The cheapest way of clearing gradients that does all that was asked for."""
        before = hooks.find("on_before_zero_grad")
        own = is_overridden(self._task, Task, "optimizer_zero_grad")
        special = any(type(optimizer).zero_grad is not Optimizer.zero_grad for optimizer in self._optimizers)
        if not (before or own or special):
            return partial(_drop_gradients, self._optimizers)

        def zero_grad() -> None:
            for optimizer in self._optimizers:
                for hook in before:
                    hook(optimizer)
                self._task.optimizer_zero_grad(
                    self._trainer.current_epoch, self._trainer.progress.batches_in_epoch, optimizer
                )

        return zero_grad


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
        model: the module to call.
        step: the task's method.
        precision: the number formats.
    """
    bare = isinstance(model, StepModule) and not (model._forward_hooks or model._forward_pre_hooks)
    bound = step if bare else partial(model, step)
    if not overrides(precision, "forward_context"):
        return bound

    def step_in_precision(*args: Any) -> Any:
        with precision.forward_context():
            return bound(*args)

    return step_in_precision


def bind_evaluation_step(
    trainer: Trainer, task: Task, model: nn.Module, step: Callable[..., Any]
) -> Callable[..., Any]:
    """A step of the task as evaluation calls it.

    Where processes hold parts of the model, only some run the step to its end; all get what it returned and logged.

    Args:
        trainer: the trainer.
        task: its task.
        model: what the strategy made of the task.
        step: the task's method.
    """
    strategy, logged = trainer.strategy, trainer.logged
    called = strategy.evaluation_model(model)
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
        output, calls = strategy.share((output, calls))
        if not strategy.computes_loss:
            output = send_to_device(output, strategy.device)
            if not logged.skips:
                logged.replay(calls, task)
        return output

    return shared_step


def _drop_gradients(optimizers: list[Optimizer]) -> None:
    """What `zero_grad()` does, without its bookkeeping for profilers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _detached(output: Any) -> Any:
    """What hooks see of a step's output: a dict with the loss, nothing that holds the graph."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return output
