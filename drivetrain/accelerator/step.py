"""One optimizer step: weigh, scale, backward, unscale, clip, step. Every driver of the engine runs it."""

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
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.timing import BACKWARD, CALLBACKS, OPTIMIZER, SYNC, Timing
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import Gradients, ReducingWrapper
from drivetrain.strategies.precision import Precision, overrides

# Gradients of a weighted mean over all micro-batches and processes, such as that over all tokens of a global batch


@dataclass(eq=False)
class WeightedMean:
    """Turns sums with weights into the gradient of their weighted mean.

    The mean over a global batch of `sum_i loss_i / sum_i weight_i` cannot be had by averaging each micro-batch's own
    mean where their weights differ. So the gradients of the sums are added up, the weights of all micro-batches and
    processes too, and the gradients scaled by their inverse once, before anything reads them. Until then they are
    scaled by a power of two of about that size: that keeps them in range, and loses no bit.

    Attributes:
        strategy: What averages gradients over processes.
        in_use: Whether losses have weights; None before the first one.
        pending: Whether there are gradients of sums that `finish` has not been called for.
        total: What the losses of the last finished window weigh, over all processes.
    """

    strategy: Strategy
    in_use: bool | None = field(default=None, init=False)
    pending: bool = field(default=False, init=False)
    total: Tensor | None = field(default=None, init=False)
    _divisor: float = field(default=1.0, init=False)
    _weights: list[Tensor] = field(default_factory=list, init=False)

    def decide(self, weight: Tensor | float | None) -> bool:
        """Find out whether losses have weights, by the first of all; call it on all processes.

        Args:
            weight: What the first loss of this process weighs, if it was given.

        Returns:
            Whether any process gave it.
        """
        if weight is None and not self.strategy.topology.environment.is_distributed:
            self.in_use = False  # without reading anything from the device
            return False
        own = self._checked(0.0 if weight is None else weight)
        given = torch.stack([own, torch.full_like(own, weight is not None)])
        total, givers = self.strategy.topology.sum(given).tolist()
        self.in_use = givers > 0
        self._divisor = _power_of_two(total)
        return self.in_use

    def part(self, loss: Tensor, weight: Tensor | float, counts: bool = True) -> Tensor:
        """What to differentiate for one micro-batch.

        Args:
            loss: The sum of this micro-batch's losses.
            weight: What they weigh together, such as the number of tokens.
            counts: Whether the micro-batch is real, rather than one that only keeps peers company.

        Raises:
            ConfigurationError: The weight is not one number, or needs gradients.
        """
        own = self._checked(weight)
        self.pending = True
        self._weights.append(own if counts else torch.zeros_like(own))
        return loss * (self.strategy.topology.averaging_processes / self._divisor if counts else 0.0)

    def expect(self) -> None:
        """Begin a window whose losses have weights, be it on other processes only."""
        self._weights.clear()
        self.pending = True

    def discard(self) -> None:
        """Forget the weights of a window that never came to its step."""
        self._weights.clear()
        self.pending = False

    def finish(self, parts: Iterable[tuple[nn.Module, Sequence[Optimizer]]]) -> None:
        """Normalise the window's gradients by the weight of all its micro-batches; call it on all processes.

        Args:
            parts: What the strategy prepared, and the optimizers that hold its parameters.

        Raises:
            ConfigurationError: This process's losses leave out parameters whose gradients the peers wait for.
        """
        parts, gradients = list(parts), self.strategy.gradients
        for model, _ in parts:
            if isinstance(model, ReducingWrapper):  # else the sum below meets the reduction that the peers are still in
                model.require_reduced()
        device = self.strategy.topology.device
        own = torch.stack(self._weights).sum() if self._weights else torch.zeros((), dtype=_wide(device), device=device)
        self.total = total = self.strategy.topology.sum(own)
        # Without any weight there is no gradient either.
        factor = torch.where(
            total > 0, self._divisor / total, torch.zeros_like(total)
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
                f"The weight of a loss is one number, such as the number of tokens it is the sum of; got {given}.",
            )
        if isinstance(weight, Tensor) and weight.requires_grad:
            raise ConfigurationError("The weight of a loss must not depend on parameters; detach() it.")
        return torch.as_tensor(weight).to(device=device, dtype=_wide(device)).reshape(())


def _power_of_two(weight: Tensor) -> float:
    value = float(weight)
    return 2.0 ** round(math.log2(value)) if value > 0 and math.isfinite(value) else 1.0


def _wide(device: torch.device) -> torch.dtype:
    """A type in which counts stay exact."""
    return torch.float32 if device.type == "mps" else torch.float64


_BACKWARD, _OPTIMIZER_STEP = Strategy.backward, Strategy.optimizer_step


@dataclass(frozen=True)
class StepHooks:
    """What a driver runs around the parts of a step; the engine pays for none that is empty.

    Attributes:
        run_backward: Takes the place of the strategy's backward: called with the loss, weighed and scaled.
        prepare_backward: Called with the loss right before the backward.
        before_backward: Called with the loss, weighed and scaled.
        after_backward: Called after each backward.
        gradients_ready: Called once the gradients of a window are complete; any that returns False leaves the step out.
        before_step: Called with each bare optimizer before it steps, its gradients unscaled.
        clip: Called with each bare optimizer after `before_step`.
        optimizer_step: Takes the place of the strategy's, with its arguments.
        share: Returns what the batch under way counts for, for a backward without a share of its own.
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
    """The step of everything that an engine has prepared.

    A raw loop runs its parts through `Accelerator.backward`, `clip_grad_norm_` and a prepared optimizer's `step`; the
    Trainer's loop runs `backward` for each micro-batch and `step_all`. Both run the same code.

    Attributes:
        window: The accumulation window.
        weights: What the losses of the window weigh, where that was given.
        timing: What the thread spends its time with; a driver begins it.
        steps_taken: Steps of single optimizers since a driver set this to 0; one skipped on overflow is none.
        is_open: Whether a driver is within a step, which ends with `close`.
        is_torn: Whether some parameters have taken the step under way and others have not.
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
        self.drive(self._hooks)

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients are held that no optimizer has stepped with; a checkpoint holds none."""
        if self.window.is_within:
            return True
        if self.window.is_abandoned:
            return False
        held = any(map(self._strategy.gradients.are_held, self._prepared.models))
        return held or any(not each.has_stepped and _has_gradients(each) for each in self._prepared.optimizers)

    def close(self) -> None:
        """Record that a driver's step is over: nothing of it is left to change parameters."""
        self.is_open = self.is_torn = False

    def drive(self, hooks: StepHooks) -> None:
        """Run a driver's hooks in every step from now on; `StepHooks()` ends that."""
        self._hooks = hooks
        strategy, precision = self._strategy, self._precision
        # What a strategy leaves as it is, is called straight: a step is short, and a call is felt in it.
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
        """Let other steps run in the body; in the end the hooks are those from before, and no gradients wait."""
        hooks, in_use = self._hooks, self.weights.in_use
        try:
            yield
        finally:
            self.drive(hooks)
            self.window.end_planned()
            self.weights.discard()
            self.weights.in_use = in_use

    def backward(
        self, loss: Tensor, weight: Tensor | float | None = None, share: float | None = None, **kwargs: Any
    ) -> None:
        """Weigh the loss of one micro-batch, scale it, and compute its gradients."""
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
            loss = self._scale(loss)  # which may change while nothing is held
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
        """What hooks of the driver return."""
        timing = self.timing
        return [timing.call(CALLBACKS, hook, *args) if timing.on else hook(*args) for hook in hooks]

    def backward_each(self, losses: Sequence[tuple[Tensor, Sequence[Tensor]]], share: float = 1.0) -> None:
        """Compute the gradients of several losses of one micro-batch, each for some parameters alone."""
        last = len(losses) - 1
        for number, (loss, leaves) in enumerate(losses):
            self.backward(loss, share=share, inputs=list(leaves), retain_graph=number < last)

    def _weigh(self, loss: Tensor, weight: Tensor | float | None, share: float) -> Tensor:
        if not self.window.planned and not self.window.holds_gradients:
            self.weights.discard()  # of a loop that was left before its step
        if weight is None:
            raise ConfigurationError(
                "This window has losses with a weight and losses without. Give accelerator.backward(loss, weight=...) "
                "one for every micro-batch.",
            )
        if self.weights.in_use is None:
            self.weights.decide(weight)
        self.window.weighted = True
        return self.weights.part(loss, weight, counts=share != 0.0)

    def finish_gradients(self) -> None:
        """Complete the gradients of a window where it ends: those of weighted sums become those of the mean."""
        if self._finish is not None and self.window.sync_gradients:
            self._finish([prepared.optimizer for prepared in self._prepared.optimizers])
        if self.weights.pending and self.window.sync_gradients:
            prepared, timing, finish = self._prepared, self.timing, self.weights.finish
            parts = [(model, prepared.optimizers_of(model)) for model in prepared.models]
            timing.call(SYNC, finish, parts) if timing.on else finish(parts)

    def is_vetoed(self) -> bool:
        """Whether a driver's hook wants the step left out. All are called: they may run collectives."""
        return any(verdict is False for verdict in self._call(self._hooks.gradients_ready))

    def prepare_step(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of a bare optimizer, and run what the driver wants before the step."""
        if self._unscale is not None:
            self._unscale(optimizer)
        if self._hooks.before_step:
            self._call(self._hooks.before_step, optimizer)
        if self._hooks.clip is not None:
            self._hooks.clip(optimizer)

    def step_all(self) -> bool:
        """Step every optimizer with the gradients of the window."""
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
        """Step one optimizer; within a window, nothing."""
        if not self.window.sync_gradients:
            return None
        optimizer, timing = prepared.optimizer, self.timing
        result: Any = None
        outer = timing.enter(OPTIMIZER) if timing.on else None
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
        """A closure whose gradients are complete and clipped whenever the optimizer reads them.

        Its loss is the mean over all processes: searching along a line, every process must see the same.
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

    # parts that a loop may run by itself

    def accumulate(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Enter the next micro-batch, and the context in which gradients are reduced only where a window ends."""
        self.window.advance()
        if self.window.sync_gradients or self.window.plugin.sync_each_batch:
            return nullcontext()
        chosen = models or self._prepared.models
        return self.without_sync(chosen[0]) if len(chosen) == 1 else self._all_without_sync(chosen)

    def without_sync(self, model: nn.Module | None) -> AbstractContextManager[Any]:
        """Context in which the gradients of a model are not reduced over processes; without one it has no effect."""
        return nullcontext() if model is None else self._strategy.gradients.no_sync(model)

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Context in which a backward reduces a model's gradients, although its forward was not to."""
        before = self._prepare_backward, self._differentiate
        if isinstance(model, ReducingWrapper):
            self._prepare_backward, self._differentiate = model.prepare_backward, self._differentiate_with_hooks
        try:
            yield
        finally:
            self._prepare_backward, self._differentiate = before

    def fused_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Backward and step in one by every optimizer that does so, as LOMO."""
        fused = [bare for one in self._prepared.optimizers if hasattr(bare := one.optimizer, "fused_backward")]
        if not fused:
            raise ConfigurationError(
                "None of the prepared optimizers steps within its backward (fused_backward), as those of lomo-optim "
                "do.",
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
        """Bring gradients to their true size: those of one or several optimizers, prepared or bare, or of all."""
        self.finish_gradients()
        chosen = self._prepared.optimizers if optimizers is None else optimizers
        for optimizer in [chosen] if isinstance(chosen, Optimizer) else chosen:
            self._precision.unscale(unwrap_optimizer(optimizer))

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, where a window ends."""
        given = self._complete(parameters)
        if given is not None:
            return self._strategy.gradients.clip_norm(given, max_norm, norm_type)
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = self._strategy.gradients.clip_norm(held, float("inf"), norm_type)
        scaler = getattr(self._precision, "scaler", None)  # nothing is unscaled before the window ends
        # Not get_scale(), which waits for the device.
        return norm if scaler is None else norm / scaler.scale(torch.ones_like(norm))

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value], where a window ends."""
        given = self._complete(parameters)
        if given is not None:
            self._strategy.gradients.scale(given, bound=clip_value)

    def _complete(self, parameters: Iterable[Tensor]) -> list[Tensor] | None:
        """The parameters, their gradients complete and at their true size; None within a window."""
        if not self.window.sync_gradients:
            return None
        self.finish_gradients()
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._unscale is not None:
            # Only the optimizers that hold any of them: the others may have no gradients yet.
            for optimizer in self._prepared.owners_of(given):
                self._unscale(optimizer)
        return given


def _has_gradients(optimizer: PreparedOptimizer) -> bool:
    """Whether any gradient is there that is not all zeros, as `zero_grad(set_to_none=False)` leaves them."""
    gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
    return any(each.is_sparse or bool(each.any()) for each in local)
