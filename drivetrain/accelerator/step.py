"""One optimizer step of the Trainer or of your own loop: scale losses, backward, unscale, clip, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerator.prepared import (
    AccumulationWindow,
    Prepared,
    PreparedOptimizer,
    parameters_of,
    unwrap_optimizer,
)
from drivetrain.runtime import observer
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.timing import BACKWARD, CALLBACKS, OPTIMIZER, SYNC, Timing
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import Gradients, ReducingWrapper
from drivetrain.strategies.precision import Precision, overrides

# Gradients of a weighted mean over all micro-batches and processes, such as that over all tokens of a global batch


@dataclass(eq=False)
class WeightedMean:
    """Weighted mean of an optimizer step's losses, over all micro-batches and processes.

    The mean over a global batch, `sum_i loss_i / sum_i weight_i`, is not the average of the micro-batches' means if
    their weights differ. This class therefore accumulates gradients of the loss sums and adds up all weights. It
    divides the gradients by the total weight once, before anything reads them. Until then, they are scaled by a power
    of two of similar size, which keeps them in range without rounding.

    Attributes:
        strategy: The strategy, which averages gradients over processes.
        in_use: True if losses have weights. None before the first loss.
        pending: True if there are gradients that `finish` has not divided yet.
        total: The total weight of the last optimizer step, over all processes.
        divisor: The power of two by which the losses of a step are divided until `finish`.
    """

    strategy: Strategy
    in_use: bool | None = field(default=None, init=False)
    pending: bool = field(default=False, init=False)
    total: Tensor | None = field(default=None, init=False)
    divisor: float = field(default=1.0, init=False)
    _weights: list[Tensor] = field(default_factory=list, init=False)

    def decide(self, weight: Tensor | float | None) -> bool:
        if weight is None and not self.strategy.topology.environment.is_distributed:
            self.in_use = False  # without reading anything from the device
            return False
        # All processes must call this together, at their first loss: losses are weighted if any process passes a
        # weight.
        own = self._checked(0.0 if weight is None else weight)
        given = torch.stack([own, torch.full_like(own, weight is not None)])
        total, givers = self.strategy.topology.sum(given).tolist()
        self.in_use = givers > 0
        self.divisor = _power_of_two(total)
        return self.in_use

    def scale_loss(self, loss: Tensor, weight: Tensor | float, counts: bool = True) -> Tensor:
        # `loss` is the sum of the micro-batch's losses, and `weight` their total weight, such as the number of tokens.
        # `counts` is False for a dummy batch, whose backward pass only lets this process take part in collectives.
        own = self._checked(weight)
        self.pending = True
        self._weights.append(own if counts else torch.zeros_like(own))
        # The strategy averages gradients over processes, so multiply by their number to get a sum. The power of two in
        # `divisor` keeps the gradients in range until `finish` divides them by the exact total.
        return loss * (self.strategy.topology.averaging_processes / self.divisor if counts else 0.0)

    def expect(self) -> None:
        # A process without a loss takes part in the sum of `finish` too, with a weight of 0.
        self._weights.clear()
        self.pending = True

    def discard(self) -> None:
        self._weights.clear()
        self.pending = False

    def finish(self, parts: Iterable[tuple[nn.Module, Sequence[Optimizer]]]) -> None:
        # All processes must call this together.
        parts, gradients = list(parts), self.strategy.gradients
        for model, _ in parts:
            if isinstance(model, ReducingWrapper):  # else the sum below meets the reduction that the peers are still in
                model.require_reduced()
        device = self.strategy.topology.device
        own = torch.stack(self._weights).sum() if self._weights else torch.zeros((), dtype=_wide(device), device=device)
        self.total = total = self.strategy.topology.sum(own)
        # Without any weight there are no gradients, and 0 / 0 would turn them into NaN.
        factor = torch.where(
            total > 0, self.divisor / total, torch.zeros_like(total)
        )  # wide: gradients may be of 64 bits
        for model, optimizers in parts:
            held = {id(each): each for one in optimizers for each in parameters_of(one)}
            gradients.scale(list(held.values()), factor, model=model)
        self.discard()

    def _checked(self, weight: Tensor | float) -> Tensor:
        device = self.strategy.topology.device
        if not isinstance(weight, Tensor | int | float) or (isinstance(weight, Tensor) and weight.numel() != 1):
            given = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)[:80]
            raise ConfigurationError(
                "The weight of a loss must be a single number, such as the number of tokens in the batch, but got "
                f"{given}.",
            )
        if isinstance(weight, Tensor) and weight.requires_grad:
            raise ConfigurationError("The weight of a loss must not require gradients. Pass weight.detach().")
        if not isinstance(weight, Tensor):
            # Filled on the device: copying a number from the host would wait for all queued kernels.
            return torch.full((), weight, device=device, dtype=_wide(device))
        return weight.to(device=device, dtype=_wide(device)).reshape(())


def _power_of_two(weight: Tensor) -> float:
    # Dividing by a power of two only changes the exponent, so it rounds nothing.
    value = float(weight)
    return 2.0 ** round(math.log2(value)) if value > 0 and math.isfinite(value) else 1.0


def _wide(device: torch.device) -> torch.dtype:
    # MPS has no float64. float32 counts exactly up to 2**24.
    return torch.float32 if device.type == "mps" else torch.float64


_BACKWARD, _OPTIMIZER_STEP = Strategy.backward, Strategy.optimizer_step


@dataclass(frozen=True)
class StepHooks:
    """Functions that an `OptimizerStep` calls before and after its backward passes and optimizer updates.

    Empty hooks cost nothing.

    Attributes:
        run_backward: Replaces the strategy's backward. Called with the weighted and scaled loss.
        prepare_backward: Called with the loss directly before the backward.
        before_backward: Called with the weighted and scaled loss.
        after_backward: Called after each backward.
        gradients_ready: Called when the gradients of all micro-batches are complete. If one returns False, the step is
            skipped.
        before_step: Called with each unwrapped optimizer before its step, with unscaled gradients.
        clip: Called with each unwrapped optimizer after `before_step`.
        optimizer_step: Replaces the strategy's optimizer step, with the same arguments.
        share: Returns the factor for the current batch's loss, for a backward call without its own `share`.
    """

    run_backward: Callable[..., Any] | None = None
    prepare_backward: Callable[[Tensor], Any] | None = None
    before_backward: tuple[Callable[[Tensor], Any], ...] = ()
    after_backward: tuple[Callable[[], Any], ...] = ()
    gradients_ready: tuple[Callable[[], Any], ...] = ()
    before_step: tuple[Callable[[Optimizer], Any], ...] = ()
    clip: Callable[[Optimizer], Any] | None = None
    optimizer_step: Callable[..., bool] | None = None
    share: Callable[[], float] | None = None


class OptimizerStep:
    """The backward pass, gradient clipping and optimizer step of a training loop, for all prepared optimizers.

    A plain loop runs the parts through `Accelerator.backward`, `clip_grad_norm_` and the `step` of a prepared
    optimizer. The Trainer calls `backward` for each micro-batch and then `step_all`. Both run the same code.

    Attributes:
        window: The counter of micro-batches for gradient accumulation.
        weights: The weights of the accumulated losses, if there are any.
        timing: Records how the thread spends its time. The Trainer starts it.
        steps_taken: The number of optimizer steps since the Trainer reset it to 0, without steps skipped on overflow.
        is_open: True while a step of the Trainer is in progress, until `close`.
        is_torn: True if some parameters have been updated in the current step and others have not.
    """

    def __init__(
        self, strategy: Strategy, precision: Precision, prepared: Prepared, window: AccumulationWindow
    ) -> None:
        self.window = window
        self.weights = WeightedMean(strategy)
        self.timing = Timing()
        self.steps_taken = 0
        self.is_open = self.is_torn = False
        self._strategy, self._precision, self._prepared = strategy, precision, prepared
        self._scale = precision.scale if overrides(precision, "scale") else None
        self._unscale = precision.unscale if overrides(precision, "unscale") else None
        self._finish = None if type(strategy.gradients).finish is Gradients.finish else strategy.gradients.finish
        self._hooks = StepHooks()
        self.set_hooks(self._hooks)

    @property
    def holds_gradients(self) -> bool:
        # A checkpoint would not contain these gradients.
        if self.window.is_within:
            return True
        if self.window.is_abandoned:
            return False
        held = any(map(self._strategy.gradients.are_held, self._prepared.models))
        return held or any(not each.has_stepped and _has_gradients(each) for each in self._prepared.optimizers)

    def close(self) -> None:
        self.is_open = self.is_torn = False

    def set_hooks(self, hooks: StepHooks) -> None:
        strategy, precision = self._strategy, self._precision
        if observer.current is not None:
            hooks = observer.current.hooks(hooks, self, precision, self._prepared)
        self._hooks = hooks
        # Skip methods that the strategy does not override, since each call costs time in a short step.
        is_plain = hooks.run_backward is None and type(strategy).backward is _BACKWARD
        self._run_backward = Tensor.backward if is_plain else hooks.run_backward or strategy.backward
        is_plain = hooks.optimizer_step is None and type(strategy).optimizer_step is _OPTIMIZER_STEP
        self._step_one: Callable[..., bool] = (
            precision.step
            if is_plain
            else partial(hooks.optimizer_step or strategy.optimizer_step, precision=precision)
        )
        self._prepare_backward = hooks.prepare_backward
        has_more = hooks.before_backward or hooks.prepare_backward or hooks.after_backward
        self._differentiate: Callable[..., Any] = self._differentiate_with_hooks if has_more else self._run_backward
        self._prepares = bool(hooks.before_step) or hooks.clip is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        hooks, in_use = self._hooks, self.weights.in_use
        try:
            # trial steps, whose gradients are dropped
            yield
        finally:
            self.set_hooks(hooks)
            self.window.end_planned()
            self.weights.discard()
            self.weights.in_use = in_use

    def backward(
        self, loss: Tensor, weight: Tensor | float | None = None, share: float | None = None, **kwargs: Any
    ) -> None:
        size, timing = self.window.size, self.timing
        if share is None:
            share = 1.0 if self._hooks.share is None else self._hooks.share()
        if weight is not None or self.weights.pending:
            loss = self._weigh(loss, weight, share)
        elif share != 1.0:
            loss = loss * (share / size)
        elif size > 1:
            loss = loss / size
        if self._scale is not None:
            loss = self._scale(loss)  # before `mark_backward`, after which the scale no longer changes
        if size > 1 or weight is not None:
            self.window.mark_backward()
        if timing.on:
            if timing.sees_sync:
                timing.mark_end_of_gradients(loss)
            timing.call(BACKWARD, partial(self._differentiate, **kwargs), loss)
        else:
            self._differentiate(loss, **kwargs)

    def _differentiate_with_hooks(self, loss: Tensor, **kwargs: Any) -> None:
        if self._hooks.before_backward:
            self._call(self._hooks.before_backward, loss)
        if self._prepare_backward is not None:
            self._prepare_backward(loss)
        self._run_backward(loss, **kwargs)
        if self._hooks.after_backward:
            self._call(self._hooks.after_backward)

    def _call(self, hooks: Iterable[Callable[..., Any]], *args: Any) -> list[Any]:
        timing = self.timing
        return [timing.call(CALLBACKS, hook, *args) if timing.on else hook(*args) for hook in hooks]

    def backward_each(self, losses: Sequence[tuple[Tensor, Sequence[Tensor]]], share: float = 1.0) -> None:
        last = len(losses) - 1
        # The losses may share a graph, which must exist until the last backward.
        for number, (loss, leaves) in enumerate(losses):
            self.backward(loss, share=share, inputs=list(leaves), retain_graph=number < last)

    def _weigh(self, loss: Tensor, weight: Tensor | float | None, share: float) -> Tensor:
        if not self.window.planned and not self.window.holds_gradients:
            self.weights.discard()  # of a loop that was left before its step
        if weight is None:
            raise ConfigurationError(
                "Some losses of this optimizer step have a weight and others do not. Pass accelerator.backward(loss, "
                "weight=...) for every micro-batch, or for none.",
            )
        if self.weights.in_use is None:
            self.weights.decide(weight)
        self.window.weighted = True
        return self.weights.scale_loss(loss, weight, counts=share != 0.0)

    def finish_gradients(self) -> None:
        if self._finish is not None and self.window.sync_gradients:
            self._finish([prepared.optimizer for prepared in self._prepared.optimizers])
        if self.weights.pending and self.window.sync_gradients:
            prepared, timing, finish = self._prepared, self.timing, self.weights.finish
            parts = [(model, prepared.optimizers_of(model)) for model in prepared.models]
            timing.call(SYNC, finish, parts) if timing.on else finish(parts)

    def is_vetoed(self) -> bool:
        # `_call` runs all hooks before the first result is read, because hooks may run collectives.
        return any(verdict is False for verdict in self._call(self._hooks.gradients_ready))

    def prepare_step(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients, then call the hooks that inspect or clip them."""
        if self._unscale is not None:
            self._unscale(optimizer)
        if self._hooks.before_step:
            self._call(self._hooks.before_step, optimizer)
        if self._hooks.clip is not None:
            self._hooks.clip(optimizer)

    def step_all(self) -> bool:
        """Step all optimizers. Return False if a step was skipped, because of an overflow or a hook."""
        if self.weights.pending or self._finish is not None:
            self.finish_gradients()
        if self._hooks.gradients_ready and self.is_vetoed():
            return False
        stepped, timing = True, self.timing
        outer = timing.enter(OPTIMIZER) if timing.on else None
        for prepared in self._prepared.optimizers:
            optimizer = prepared.optimizer
            if self._prepares:
                self.prepare_step(optimizer)
            # An error between here and the end of the loop leaves some parameters newer than others.
            self.is_torn = True
            done = self._step_one(optimizer)
            prepared.step_was_skipped = not done
            prepared.has_stepped = True
            stepped = stepped and done
        self.is_torn = False
        if outer is not None:
            timing.enter(outer)
        return stepped

    def step(self, prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        if not self.window.sync_gradients:
            return None
        optimizer, timing = prepared.optimizer, self.timing
        result: Any = None
        outer = timing.enter(OPTIMIZER) if timing.on else None
        # Such an optimizer calls the closure several times. For any other, run it before the step, so that the
        # gradients can be completed and clipped in between.
        if closure is not None and prepared.needs_closure:
            self.is_torn = True
            done = self._step_one(optimizer, closure=self._prepared_closure(optimizer, closure))
        else:
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            if self.weights.pending or self._finish is not None:
                self.finish_gradients()
            if self._prepares:
                self.prepare_step(optimizer)
            self.is_torn = True
            done = self._step_one(optimizer)
        self.is_torn = self.is_open
        prepared.step_was_skipped = not done
        prepared.has_stepped = True
        prepared.holds_abandoned = False
        self.steps_taken += done
        if outer is not None:
            timing.enter(outer)
        return result

    def _prepared_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap an optimizer's closure so that each call also reduces, unscales and clips the gradients.

        The returned closure returns the mean loss over all processes, because a line search must take the same
        decisions on every process.
        """

        def compute_gradients() -> Any:
            with torch.enable_grad():  # an optimizer's step may be decorated with no_grad
                result = closure()
            self.finish_gradients()
            if self._prepares:
                self.prepare_step(optimizer)
            if isinstance(result, float):
                result = torch.tensor(result, device=self._strategy.topology.device)
            return reduce(result.detach()) if isinstance(result, Tensor) else result

        return compute_gradients

    # parts that a custom loop may call directly

    def accumulate(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Start the next micro-batch, and return the context manager for its forward and backward pass.

        Gradients are reduced only for the last micro-batch of an optimizer step, or always with `sync_each_batch`.
        """
        self.window.advance()
        if self.window.sync_gradients or self.window.plugin.sync_each_batch:
            return nullcontext()
        chosen = models or self._prepared.models
        return self.without_sync(chosen[0]) if len(chosen) == 1 else self._all_without_sync(chosen)

    def without_sync(self, model: nn.Module | None) -> AbstractContextManager[Any]:
        """Return a context manager in which backward passes do not reduce gradients."""
        return nullcontext() if model is None else self._strategy.gradients.no_sync(model)

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        before = self._prepare_backward, self._differentiate
        if isinstance(model, ReducingWrapper):
            self._prepare_backward, self._differentiate = model.prepare_backward, self._differentiate_with_hooks
        try:
            yield
        finally:
            self._prepare_backward, self._differentiate = before

    def fused_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Run backward and update the weights in one pass, as LOMO optimizers do."""
        fused = [bare for one in self._prepared.optimizers if hasattr(bare := one.optimizer, "fused_backward")]
        if not fused:
            raise ConfigurationError(
                "No prepared optimizer has a fused backward, which optimizers such as those of lomo-optim have. "
                "Prepare one of them, or call accelerator.backward(loss) and optimizer.step().",
            )
        for optimizer in fused:
            optimizer.fused_backward(loss / self.window.size, learning_rate)

    @contextmanager
    def _all_without_sync(self, models: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.without_sync(model))
            yield

    def unscale(self, optimizers: Optimizer | Sequence[Optimizer] | None) -> None:
        """Undo the loss scaling in the gradients of the given optimizers, or of all optimizers for None."""
        self.finish_gradients()
        chosen = self._prepared.optimizers if optimizers is None else optimizers
        for optimizer in [chosen] if isinstance(chosen, Optimizer) else chosen:
            self._precision.unscale(unwrap_optimizer(optimizer))

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients to a total norm of at most `max_norm`. Return the norm before clipping.

        While gradients still accumulate, nothing is clipped, and the norm of this process's gradients so far is
        returned.
        """
        given = self._complete(parameters)
        if given is not None:
            return self._strategy.gradients.clip_norm(given, max_norm, norm_type)
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = self._strategy.gradients.clip_norm(held, float("inf"), norm_type)
        scaler = getattr(self._precision, "scaler", None)  # nothing is unscaled before the window ends
        # Not get_scale(), which waits for the device.
        return norm if scaler is None else norm / scaler.scale(torch.ones_like(norm))

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to `[-clip_value, clip_value]`."""
        given = self._complete(parameters)
        if given is not None:
            self._strategy.gradients.scale(given, bound=clip_value)

    def _complete(self, parameters: Iterable[Tensor]) -> list[Tensor] | None:
        if not self.window.sync_gradients:
            # between the micro-batches of a step
            return None
        self.finish_gradients()
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._unscale is not None:
            # Only the optimizers that hold any of them: the others may have no gradients yet.
            for optimizer in self._prepared.owners_of(given):
                self._unscale(optimizer)
        if observer.current is not None:
            observer.current.before_clipping()
        return given


def _has_gradients(optimizer: PreparedOptimizer) -> bool:
    gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
    return any(each.is_sparse or bool(each.any()) for each in local)
