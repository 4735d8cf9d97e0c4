"""One optimizer step of a task: the forward and backward of its micro-batches, and the hooks around them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerator.preparation import under_precision
from drivetrain.accelerator.step import StepHooks
from drivetrain.data import PendingBatch
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.pytrees import send_to_device
from drivetrain.runtime.timing import CALLBACKS, DATA, FORWARD, OPTIMIZER, SYNC
from drivetrain.strategies import StepModule, Strategy
from drivetrain.strategies.base import ReducingWrapper, zero_loss
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.step_module import ATTACHES_PRESENCE
from drivetrain.trainer.hooks import Hooks, is_overridden
from drivetrain.trainer.loops.progress import Foresight, counters
from drivetrain.trainer.metrics.logged_values import LoggedValues
from drivetrain.trainer.metrics.metric_sync import untouched_metrics
from drivetrain.trainer.optimizers import end_epoch_of_schedulers, step_step_schedulers
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.loops.progress import CurrentRun
    from drivetrain.trainer.trainer import Trainer


# The output of `training_step`


class StepOutput:
    def __init__(self, task_name: str) -> None:
        self._step = f"{task_name}.training_step"

    def loss_of(self, output: Any) -> Tensor | None:
        """Return the loss in the output of `training_step`, or None for a skipped batch."""
        if isinstance(output, Tensor):
            return output
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            loss: Tensor = output["loss"]
            return loss
        if output is None:
            return None
        is_dict = isinstance(output, Mapping)
        given = f"a dict with the keys {sorted(map(str, output))}" if is_dict else repr(output)[:80]
        rule = (
            "In a dict, the 'loss' key needs to be present" if is_dict else "It must return a Tensor, a dict, or None"
        )
        raise ConfigurationError(
            f"{self._step} returned {given}. {rule}. Return the loss as a scalar tensor, a dict with the key 'loss', "
            "or None to skip the batch.",
        )

    def check_of_manual(self, output: Any) -> None:
        if output is not None and not isinstance(output, Tensor | Mapping):
            raise ConfigurationError(
                f"{self._step} returned {repr(output)[:80]}. With automatic_optimization = False it must return a "
                "Tensor or have no return. Allowed are a tensor or a dict, which the hooks receive, or None.",
            )

    def has_weight(self, output: Any) -> bool:
        return isinstance(output, Mapping) and "weight" in output

    def weight_of(self, output: Any) -> Tensor | float:
        """Return the weight that `training_step` returned with its loss, such as the number of tokens."""
        if self.has_weight(output):
            weight: Tensor | float = output["weight"]
            return weight
        raise ConfigurationError(
            f"{self._step} returned a loss without a weight, after one with a weight. Return {{'loss': sum, 'weight': "
            "tokens} for every batch, or None to skip one.",
        )

    def refuse_weight(self) -> None:
        raise ConfigurationError(
            f"{self._step} returned a loss with a weight, after one without. Return {{'loss': sum, 'weight': tokens}} "
            "for every batch, or for none.",
        )

    def explain(self, loss: Tensor, error: RuntimeError | None = None) -> None:
        if error is not None and "static_graph set to True" in str(error):
            raise ConfigurationError(
                f"{self._step} used other parameters than in the first step, for example because it returned None for "
                "a batch. DDP(static_graph=True) does not allow that. Remove static_graph=True, or use "
                "find_unused_parameters=True instead.",
            ) from error
        if loss.numel() != 1:
            raise ConfigurationError(
                f"{self._step} returned a tensor of shape {tuple(loss.shape)}. Return a scalar, such as loss.mean().",
            ) from error
        if not loss.requires_grad:
            raise ConfigurationError(
                f"{self._step} returned a loss that does not depend on any trainable parameter, so it has no "
                "gradients. Compute the loss from the task's modules, without detach(), item() or no_grad(), or return "
                "None to skip the batch.",
            ) from error


def detached(output: Any) -> Any:
    """Detach the output of `training_step` from the autograd graph, for `on_train_batch_end`."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return output


# Batches that `training_step` skips


class DummyLoss:
    """Zero loss for a rank whose `training_step` returned None, so that the rank joins the gradient all-reduce.

    The strategy's wrapper may have a parameter `presence` with the value zero, which is added to each real loss. Its
    all-reduced gradient is above zero if any rank had a real batch.
    """

    def __init__(self, strategy: Strategy, task: nn.Module, model: nn.Module | None, names: Sequence[str] = ()) -> None:
        self._names = names
        self._zero_loss = partial(zero_loss, strategy, task, model)
        self._shares_batches = strategy.topology.data_shard.count == 1
        self._presence = presence_parameter(model)
        self.was_dummy = False

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step` so that a rank that skips a batch, by returning None, still takes part in the all-reduce.

        A zero loss replaces None. It is computed from the output of the forward. DDP searches that output for the
        parameters that take part in the backward.
        """
        presence = self._presence

        def step_or_dummy(*args: Any) -> Any:
            output = step(*args)
            self.was_dummy = output is None
            if output is None:
                zero = self._zero_loss()
                # DDP expects a gradient for `presence` from every rank, so the zero loss depends on it too.
                zero = zero if presence is None else zero + presence * 0.0
                return dict.fromkeys(self._names, zero) if self._names else zero
            return output if presence is None else _attached(output, presence, *self._names[:1])

        setattr(step_or_dummy, ATTACHES_PRESENCE, True)
        return step_or_dummy

    @property
    def leaves(self) -> list[Tensor]:
        # Its gradient shows whether any rank computed a real loss.
        return [] if self._presence is None else [self._presence]

    def anyone_took_part(self) -> bool:
        # Valid only on a rank that skipped all of its own batches, after the backward.
        if self._presence is not None:
            return self._presence.grad is not None and float(self._presence.grad) != 0.0
        return not self._shares_batches


def presence_parameter(model: nn.Module | None) -> nn.Parameter | None:
    # The gradient of `presence` shows whether any rank had a loss that `training_step` returned.
    if model is None:
        return None
    return next((module.presence for module in model.modules() if isinstance(module, StepModule)), None)


def _attached(output: Any, presence: nn.Parameter, name: str = "loss") -> Any:
    if isinstance(output, Tensor):
        return _added(output, presence)
    if isinstance(output, Mapping) and isinstance(output.get(name), Tensor):
        return {**output, name: _added(output[name], presence)}
    return output


def _added(loss: Tensor, presence: nn.Parameter) -> Tensor:
    # A loss without a graph is refused later by `explain`. The sum would have a graph and hide the mistake.
    return loss + presence.to(loss.dtype) if loss.requires_grad and loss.numel() == 1 else loss


# Adapters between the loops and the task's steps


class DataEnded(Exception):
    """Raised if a step that takes `dataloader_iter` asks for a batch after the last one, to end the loop."""


Following = Callable[[], tuple[Any, int, int] | None]


def adapt_step(task: Task, name: str, following: Following = lambda: None) -> Callable[..., Any]:
    # The loops always pass a batch, its index and its loader's index. A step with a single parameter receives the batch
    # alone. A step with a parameter `dataloader_iter` receives an iterator over tuples of these three, starting at the
    # current batch.
    step: Callable[..., Any] = getattr(task, name)
    parameters = list(inspect.signature(step).parameters.values())
    if any(each.name == "dataloader_iter" for each in parameters):
        return partial(_call_with_iterator, step, following)
    takes_more = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return step if takes_more or len(parameters) != 1 else partial(_call_with_batch, step)


def _leave_out(*_: Any) -> None:
    words = "train_dataloader yielded None. If this was on purpose, ignore this warning. The batch is skipped."
    warnings.warn(words, stacklevel=2)


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
    """Iterator over an evaluation loader, shared by the loop and by steps that fetch batches by `dataloader_iter`."""

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
        for batch in self:
            return batch, self.index, self._position
        return None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *error: object) -> None:
        self.batch = None
        # Without the old iterator, the loader's workers end even if the loop stopped early.
        self._batches = iter(())
        self._current.leave_batch()


@contextmanager
def muted_logging(logged: LoggedValues, task: Task) -> Iterator[None]:
    # Logged values and metric updates in the `with` block are discarded.
    before = logged.skips
    logged.skips = True
    try:
        with untouched_metrics(task):
            yield
    finally:
        logged.skips = before


def bind_step(
    model: nn.Module, step: Callable[..., Any], strategy: Strategy, precision: Precision
) -> Callable[..., Any]:
    # A bare `StepModule` would only call the step, so its overhead is avoided. Forward hooks need the call.
    if isinstance(model, StepModule) and not (model._forward_hooks or model._forward_pre_hooks):
        return under_precision(step, precision)
    if strategy.schedules_microbatches:
        # The layers run in the schedule, outside of the step.
        return under_precision(partial(model, step), precision)
    # Inside the wrapper: DeepSpeed's engine disables autocast on CUDA if it is enabled when the engine is called.
    return partial(model, under_precision(step, precision))


def bind_evaluation_step(
    trainer: Trainer, task: Task, model: nn.Module, step: Callable[..., Any]
) -> Callable[..., Any]:
    # If the model is split into pipeline stages, only the last stage finishes the step. Its output and logged values
    # are then sent to all other ranks.
    strategy, logged = trainer.strategy, trainer.logged
    called = strategy.view(model, "evaluate")
    if not strategy.schedules_microbatches:
        return bind_step(called, step, strategy, trainer.accelerator.precision)

    def step_or_probe(*args: Any, probe: bool = False) -> Any:
        if not probe:
            return step(*args)
        with muted_logging(logged, task):
            return step(*args)

    bound = bind_step(called, step_or_probe, strategy, trainer.accelerator.precision)

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


SKIP_EPOCH = -1


class EpochSkipped(Exception):
    """Exception that ends the current epoch because `on_train_batch_start` returned -1."""


class PlainStep:
    """Performs the training steps of a task with automatic optimization. Base class of the other step classes.

    The constructor makes all choices that stay equal during a run, so that each step runs only what it needs.
    """

    _keeps_window = False  # True keeps micro-batches and outputs until the step ends, since a closure reads them again

    def __init__(self, trainer: Trainer, task: Task, model: nn.Module, hooks: Hooks) -> None:
        accelerator, actions = trainer.accelerator, trainer.actions
        strategy = accelerator.strategy
        self._trainer, self._task, self._model = trainer, task, model
        self._progress, self._logged, self._current = trainer.progress, trainer.logged, trainer.current
        self._steps_schedulers = trainer.task_run.steps_schedulers
        self._ends_epochs = trainer.task_run.ends_epochs_of_schedulers
        self._engine, self._timing = accelerator.optimizer_step, accelerator.optimizer_step.timing
        self._forward_backward = strategy.forward_backward
        self._dummy_loss = self._choose_dummy_loss()
        self._taken: list[PendingBatch] = []  # batches that the step took from `dataloader_iter`
        step = adapt_step(task, "training_step", self._take_following)
        bound, self._no_step = map(self._bind, (step, _leave_out))
        self._training_step = actions.watch(actions.of_strategy("training_step"), bound)
        self._output = StepOutput(type(task).__name__)
        self.take_optimizers()
        self._shards = 1
        self._is_weighted: bool | None = None
        self._on_batch_start = hooks.find("on_train_batch_start")
        self._on_batch_end = hooks.find("on_train_batch_end")
        self._engine.weights.in_use = None
        self._engine.close()
        self._engine.set_hooks(actions.watch_step(self._step_hooks(hooks)))
        counts = counters(trainer, task)
        self._counters = [each.count for each in counts]
        self._before_release = [each.note for each in counts if each.note is not None]
        self._foresight = Foresight.of(trainer)
        self._remaining = 1
        self._has_gradients = self._took_part = False

    def take_optimizers(self) -> None:
        self._optimizers = [optimizer.optimizer for optimizer in self._trainer.task_optimizers]
        self._zero_grad, self._clears_first = choose_zero_grad(self._trainer, self._task, self._optimizers)

    def _step_hooks(self, hooks: Hooks) -> StepHooks:
        trainer, task = self._trainer, self._task
        clips = trainer.gradient_clip_val is not None or is_overridden(task, Task, "configure_gradient_clipping")
        return StepHooks(
            run_backward=task.backward if is_overridden(task, Task, "backward") else None,
            before_backward=hooks.find("on_before_backward"),
            after_backward=hooks.find("on_after_backward"),
            gradients_ready=hooks.find("on_gradients_ready"),
            before_step=hooks.find("on_before_optimizer_step"),
            clip=self._clipping() if clips else None,
        )

    def _bind(self, step: Callable[..., Any]) -> Callable[..., Any]:
        replacing = step if self._dummy_loss is None else self._dummy_loss.wrap(step)
        return bind_step(self._model, replacing, self._trainer.strategy, self._trainer.accelerator.precision)

    def _choose_dummy_loss(self) -> DummyLoss | None:
        trainer = self._trainer
        return DummyLoss(trainer.strategy, self._task, trainer.task_run.model) if trainer.world_size > 1 else None

    def spread_over(self, shards: int) -> None:
        self._shards = shards  # determines the weight of each rank's loss

    def run(self, window: list[PendingBatch]) -> bool:
        """Train on the micro-batches in `window`, and return True if an optimizer step was taken."""
        self._begin(window)
        outputs = self._forward_backward(self._model, self.run_micro_batch, window)
        # `_has_loss` waits for the device, so it runs only if this rank skipped all of its batches.
        has_loss = self._took_part or self._has_loss()
        stepped = self._engine.step_all() if has_loss else self._trainer.steps_without_loss(window)
        return self._finish(window, outputs[-1], stepped)

    def try_gradients(self, window: Sequence[PendingBatch]) -> None:
        # A search calls this to find out whether memory is enough.
        self._begin(window)
        with self._engine.without_sync(self._trainer.task_run.model):
            for micro_batch in window:
                self.run_micro_batch(micro_batch)
        self._zero_grad()

    def _begin(self, window: Sequence[PendingBatch]) -> None:
        self._remaining = size = len(window)
        self._has_gradients = self._took_part = False
        self._engine.is_open = True
        if self._foresight is not None:
            self._foresight.begin(window)
        if self._clears_first:
            timing = self._timing
            timing.call(OPTIMIZER, self._zero_grad) if timing.on else self._zero_grad()
        self._engine.window.begin(size)
        if self._is_weighted:
            self._engine.weights.expect()

    def run_micro_batch(self, micro_batch: PendingBatch) -> Any:
        """Run a micro-batch's hooks, forward and backward, and return the step's output.

        To save memory, None is returned for all but the last micro-batch of a step, unless the step reads them again.
        """
        timing, current = self._timing, self._current
        current.batch = None  # frees the old batch before the next one is copied to the device
        batch = timing.call(DATA, micro_batch.take) if timing.on else micro_batch.take()
        current.batch, current.batch_info = batch, micro_batch.info
        share = 1.0
        if self._shards > 1:
            share = micro_batch.info.share(self._shards)
            self._logged.skips = share == 0.0  # set before the hooks: they must not log for a dummy batch
        if self._on_batch_start:
            self._announce(micro_batch)
        if self._engine.window.size > 1:
            self._engine.window.advance_planned()
        # Not `timing.call`, which would add a frame to tracebacks of the task.
        outer = timing.enter(FORWARD) if timing.on else None
        step = self._no_step if batch is None else self._training_step
        if share:
            output = step(batch, micro_batch.batch_idx)
        else:
            # Padding rows must not update the task's metrics.
            with untouched_metrics(self._task):
                output = step(batch, micro_batch.batch_idx)
        if outer is not None:
            timing.enter(outer)
        loss = output if isinstance(output, Tensor) else self._loss_of(output)
        if loss is not None:
            self._differentiate(loss, output, share)
        self._remaining -= 1
        if self._remaining:
            if self._on_batch_end:
                self._end_batch(output, micro_batch)
            if not self._keeps_window:
                self._release(micro_batch)
                return None
        return output

    def _release(self, micro_batch: PendingBatch) -> None:
        for note in self._before_release:
            note(micro_batch)
        micro_batch.release()

    def _take_following(self) -> tuple[Any, int, int] | None:
        loop, info, timing = self._trainer.loop, self._current.batch_info, self._timing
        if loop is None or info is None:
            return None
        following = loop.batches.following
        taken = timing.call(DATA, following, info.index) if timing.on else following(info.index)
        if taken is None:
            return None
        self._taken.append(taken)
        self._current.batch, self._current.batch_info = taken.batch, taken.info
        return taken.batch, taken.batch_idx, 0

    def _announce(self, micro_batch: PendingBatch) -> None:
        batch, index, timing = micro_batch.batch, micro_batch.batch_idx, self._timing
        for hook in self._on_batch_start:
            if (timing.call(CALLBACKS, hook, batch, index) if timing.on else hook(batch, index)) == SKIP_EPOCH:
                raise EpochSkipped

    def _differentiate(self, loss: Tensor, output: Any, share: float) -> None:
        is_dummy = self._dummy_loss is not None and self._dummy_loss.was_dummy
        if not self._has_gradients:
            self._has_gradients = True
            if not self._clears_first:
                timing = self._timing
                timing.call(OPTIMIZER, self._zero_grad) if timing.on else self._zero_grad()
        # Only real rows count: if no rank has any, the optimizer must not step.
        if share and not is_dummy:
            self._took_part = True
        self._run_backward(loss, output, share, is_dummy)

    def _loss_of(self, output: Any) -> Any:
        return self._output.loss_of(output)

    def _run_backward(self, loss: Any, output: Any, share: float, is_dummy: bool) -> None:
        if self._is_weighted is None:
            self._is_weighted = self._decide_weighted(output)
        weight: Tensor | float | None = None
        if self._is_weighted:
            # A skipped batch must not count in the sum of weights.
            weight = 0.0 if is_dummy else self._output.weight_of(output)
        elif loss is not output and self._output.has_weight(output):
            self._output.refuse_weight()
        try:
            self._engine.backward(loss, weight, share)
        except RuntimeError as error:
            self._output.explain(loss, error)
            raise

    def _decide_weighted(self, output: Any) -> bool | None:
        return self._engine.weights.decide(output["weight"] if self._output.has_weight(output) else None)

    def _has_loss(self) -> bool:
        if not self._has_gradients:
            return False
        if self._took_part or self._dummy_loss is None:
            return self._took_part
        timing, anyone = self._timing, self._dummy_loss.anyone_took_part
        return timing.call(SYNC, anyone) if timing.on else anyone()

    def _finish(self, window: list[PendingBatch], output: Any, steps: int) -> bool:
        progress, last = self._progress, window[-1]
        self._engine.close()
        if self._taken:
            # The progress must count these batches too, or a resumed run would train on them again.
            window.extend(self._taken)
            self._taken.clear()
            last = window[-1]
        progress.batches_in_epoch = last.batch_idx + 1
        progress.total_batches += len(window)
        for count in self._counters:
            count(window)
        if steps:
            progress.global_step += steps
            if self._steps_schedulers:
                step_step_schedulers(self._trainer)
        if self._ends_epochs and (last.info.last or progress.batches_in_epoch >= self._current.training_batches):
            end_epoch_of_schedulers(self._trainer)
        if self._on_batch_end:
            self._end_batch(output, last)
        if self._shards > 1:
            self._logged.skips = False
        return steps > 0

    def _end_batch(self, output: Any, micro_batch: PendingBatch) -> None:
        outputs, batch, index, timing = detached(output), micro_batch.batch, micro_batch.batch_idx, self._timing
        for hook in self._on_batch_end:
            timing.call(CALLBACKS, hook, outputs, batch, index) if timing.on else hook(outputs, batch, index)

    def _clipping(self) -> Callable[[Optimizer], None]:
        trainer, clip = self._trainer, self._task.configure_gradient_clipping
        # An override may name its arguments differently. They are then passed by position.
        try:
            inspect.signature(clip).bind(None, gradient_clip_val=None, gradient_clip_algorithm=None)
        except TypeError:
            return lambda optimizer: clip(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        return lambda optimizer: clip(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )


class ManualStep(PlainStep):
    """Performs the training steps of a task that calls backward and the optimizers itself."""

    def _step_hooks(self, hooks: Hooks) -> StepHooks:
        task, model = self._task, self._trainer.task_run.model
        return StepHooks(
            run_backward=task.backward if is_overridden(task, Task, "backward") else None,
            prepare_backward=model.prepare_backward if isinstance(model, ReducingWrapper) else None,
            before_backward=hooks.find("on_before_backward"),
            after_backward=hooks.find("on_after_backward"),
            before_step=hooks.find("on_before_optimizer_step"),
            share=self._share_of_batch,
        )

    def _share_of_batch(self) -> float:
        info = self._current.batch_info
        return 1.0 if self._shards == 1 or info is None else info.share(self._shards)

    def _choose_dummy_loss(self) -> DummyLoss | None:
        return None

    def try_gradients(self, window: Sequence[PendingBatch]) -> None:
        # With manual optimization, only `training_step` can compute gradients, and it steps the optimizers as well.
        ...

    def run(self, window: list[PendingBatch]) -> bool:
        self._begin(window)
        self._engine.steps_taken = 0
        outputs = self._forward_backward(self._model, self.run_micro_batch, window)
        return self._finish(window, outputs[-1], self._engine.steps_taken)

    def _loss_of(self, output: Any) -> Any:
        # Returns None, since the task has already run its own backward.
        self._output.check_of_manual(output)

    def _differentiate(self, loss: Tensor, output: Any, share: float) -> None: ...


def choose_zero_grad(trainer: Trainer, task: Task, optimizers: list[Optimizer]) -> tuple[Callable[[], None], bool]:
    # The second value is True if gradients may be cleared before the forward. Hooks that observe the call exclude it.
    if not optimizers and task.automatic_optimization:
        return task.zero_grad, type(task).zero_grad is nn.Module.zero_grad
    before = trainer.hooks.find("on_before_zero_grad")
    own = is_overridden(task, Task, "optimizer_zero_grad")
    special = any(type(optimizer).zero_grad is not Optimizer.zero_grad for optimizer in optimizers)
    beside = presence_parameter(trainer.task_run.model)
    if not (before or own or special):
        if len(optimizers) == 1 and beside is None:
            return optimizers[0].zero_grad, task.automatic_optimization
        return partial(clear_gradients, optimizers, beside), task.automatic_optimization

    def zero_grad() -> None:
        clear_gradients((), beside)
        for optimizer in optimizers:
            for hook in before:
                hook(optimizer)
            task.optimizer_zero_grad(trainer.current_epoch, trainer.progress.batches_in_epoch, optimizer)

    return zero_grad, False


def clear_gradients(optimizers: Iterable[Optimizer], beside: nn.Parameter | None) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    if beside is not None:  # a parameter that no optimizer has, such as `presence`
        beside.grad = None
