"""Prepared models, optimizers, schedulers and loaders of a run, in the order of preparation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.accelerator.accelerate_names import GradientAccumulationPlugin
from drivetrain.data import ActiveLoaders, PreparedLoader
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import OptimizerProxy, lay_out_state, local_part, needs_closure, scale_tensors

if TYPE_CHECKING:
    from drivetrain.accelerator.step import OptimizerStep


@dataclass
class Prepared:
    models: list[nn.Module] = field(default_factory=list)  # as the strategy returned them
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)  # further objects whose state is saved

    def optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        bare = [optimizer.optimizer for optimizer in self.optimizers]
        if len(self.models) == 1:
            return bare
        own = {id(parameter) for parameter in model.parameters()}
        return [one for one in bare if any(id(parameter) in own for parameter in parameters_of(one))]

    def owners_of(self, parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
        wanted = {id(parameter) for parameter in parameters}
        bare = (optimizer.optimizer for optimizer in self.optimizers)
        return [one for one in bare if any(id(parameter) in wanted for parameter in parameters_of(one))]

    @property
    def step_was_skipped(self) -> bool:
        """True if an optimizer skipped its last step because gradients overflowed in fp16."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def forget(self, objects: Sequence[Any]) -> None:
        """Stop keeping track of the given objects. Objects that were not prepared are ignored."""
        gone = {id(item) for item in objects}
        for group in self._groups():
            group[:] = [item for item in group if id(item) not in gone]

    def forget_model(self, model: nn.Module) -> None:
        """Stop keeping track of a model and of its own optimizers and schedulers."""
        own = {id(parameter) for parameter in model.parameters()}
        optimizers = [o for o in self.optimizers if all(id(parameter) in own for parameter in parameters_of(o))]
        gone = {id(optimizer) for optimizer in optimizers}
        schedulers = [s for s in self.schedulers if s.optimizers and all(id(o) in gone for o in s.optimizers)]
        self.forget([model, *optimizers, *schedulers])

    def clear(self) -> None:
        # `registered` stays: checkpoints still contain these objects.
        for group in self._groups():
            group.clear()

    def _groups(self) -> tuple[list[Any], ...]:
        return self.models, self.optimizers, self.schedulers, self.loaders


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer in one list."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# `accelerator.gradient_state`: gradient accumulation and the loaders being iterated


_GRADIENTS = "gradients"


class GradientState:
    """Status of gradient accumulation, available as `accelerator.gradient_state`.

    An instance that a script creates shows the Accelerator that was created last.

    Args:
        gradient_accumulation_plugin: The accumulation settings, if there is no Accelerator.
        window: The counter of micro-batches of an Accelerator.
        active: The loaders being iterated.
    """

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        window: AccumulationWindow | None = None,
        active: ActiveLoaders | None = None,
    ) -> None:
        self._plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        # Weak references, so that the registry does not keep a deleted Accelerator alive.
        self._own = None if window is None or active is None else (weakref.ref(window), weakref.ref(active))
        self._synchronises = True
        if self._own is not None:
            PartialState.registry()[_GRADIENTS] = self._own

    @classmethod
    def _reset_state(cls) -> None:
        # Instances that are created later then have default values.
        PartialState.registry().pop(_GRADIENTS, None)

    def _find(self) -> tuple[AccumulationWindow | None, ActiveLoaders | None]:
        window, active = self._own or PartialState.registry().get(_GRADIENTS) or (_nothing, _nothing)
        return window(), active()

    @property
    def initialized(self) -> bool:
        """True if an `Accelerator` exists, so that `GradientState` returns its gradient accumulation settings."""
        return self._find()[0] is not None

    @property
    def sync_gradients(self) -> bool:
        """True during the last micro-batch before an optimizer step."""
        window, _ = self._find()
        return self._synchronises if window is None else window.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        window, _ = self._find()
        if window is None:
            self._synchronises = value
        else:
            window.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def plugin(self) -> GradientAccumulationPlugin:
        """The current options of gradient accumulation, as a `GradientAccumulationPlugin`."""
        window, _ = self._find()
        return self._plugin if window is None else window.plugin

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The gradient accumulation options by name, such as `num_steps`, as a dict that may be changed.

        Changes apply from the next micro-batch on.
        """
        return vars(self.plugin)

    @property
    def num_steps(self) -> int:
        """The number of micro-batches whose gradients accumulate for each optimizer step."""
        return self.plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """The `adjust_scheduler` option that was passed to `GradientAccumulationPlugin`. It has no effect."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True if optimizers step on a loader's last batch, even after fewer than `num_steps` micro-batches."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """The option `sync_each_batch`: True if processes reduce gradients after every micro-batch."""
        return self.plugin.sync_each_batch

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The data loader being iterated, which in nested loops is the innermost one.

        None outside of loops.
        """
        _, active = self._find()
        return None if active is None else active.innermost

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """List of the data loaders being iterated, outermost first.

        Its first entry is always None.
        """
        _, active = self._find()
        return [None, *(active.loaders if active is not None else [])]

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared data loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True during the last batch of the innermost data loader that is being iterated."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The number of samples in the epoch's last global batch, not counting padding.

        -1 before the last batch, or if unknown.
        """
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always True. On XLA devices, gradients have already been reduced when an optimizer steps."""
        return True

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def _nothing() -> None:
    return None


# Optimizer that steps only at the end of an accumulation window, and records if a step was skipped


class PreparedOptimizer(OptimizerProxy):
    """Optimizer from `Accelerator.prepare`, whose steps wait for all micro-batches.

    Other attributes are those of the original optimizer.

    Args:
        optimizer: The original optimizer, also available as `.optimizer`.
        step: The Accelerator's optimizer step, which runs this optimizer.
        prepared: The prepared objects of the run.
        strategy: The strategy, which reduces gradients over processes.

    Attributes:
        needs_closure: True if the optimizer cannot step without a closure, such as L-BFGS.
        step_was_skipped: True if the last step was skipped because gradients overflowed.
        has_stepped: True if a step has used the current gradients.
        holds_abandoned: True if the gradients belong to an accumulation window whose loop ended before its step.
    """

    def __init__(self, optimizer: Optimizer, step: OptimizerStep, prepared: Prepared, strategy: Strategy) -> None:
        # Not Optimizer.__init__: parameters, state and defaults are those of the optimizer inside.
        self.optimizer = optimizer
        self.needs_closure = needs_closure(optimizer)
        self._engine_step = step.step
        self._window = step.window
        self._prepared, self._strategy = prepared, strategy
        self.step_was_skipped = False
        self.has_stepped = False
        self.holds_abandoned = False

    def __getattr__(self, name: str) -> Any:
        # While an object is copied, the attribute may not exist yet, and `getattr` below would recurse.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Its gradients are reduced from the next step on.
        """
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless micro-batches are still being accumulated."""
        if self.has_stepped or not self._window.holds_gradients:
            self.has_stepped = self.holds_abandoned = False
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the model's weights if the current batch is the last one of the gradient accumulation.

        Otherwise, do nothing.

        Args:
            closure: A function that computes the loss and its gradients. None if the gradients exist already.

        Returns:
            The closure's return value.
        """
        return self._engine_step(self, closure)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Return a context manager that freezes all parameters that this optimizer does not update.

        Use it to train one network of a GAN at a time.

        Args:
            sync_grad: True to reduce gradients over processes in the body.
        """
        mine = {id(parameter) for parameter in parameters_of(self)}
        models = self._prepared.models
        others = [
            (parameter, parameter.requires_grad)
            for model in models
            for parameter in model.parameters()
            if id(parameter) not in mine
        ]
        for parameter, _ in others:
            parameter.requires_grad_(False)
        try:
            with ExitStack() as stack:
                for model in [] if sync_grad else models:
                    stack.enter_context(self._strategy.gradients.no_sync(model))
                yield
        finally:
            for parameter, required in others:
                parameter.requires_grad_(required)

    def train(self) -> Any:
        """Switch a schedule-free optimizer, which has a `train` method, to training mode."""
        return self.optimizer.train() if hasattr(self.optimizer, "train") else None

    def eval(self) -> Any:
        """Switch a schedule-free optimizer, which has an `eval` method, to evaluation mode."""
        return self.optimizer.eval() if hasattr(self.optimizer, "eval") else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)
        lay_out_state(self.optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unprepared_optimizer, (self.optimizer,)


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the original optimizer from a prepared one.

    Other optimizers are returned unchanged.
    """
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


# Replaces the engine of a copied or unpickled optimizer, which belongs to no Accelerator: each `step` runs.
class _Alone:
    window = None
    holds_gradients = False

    @staticmethod
    def step(prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        prepared.has_stepped = True
        return prepared.optimizer.step(closure)


def _unprepared_optimizer(optimizer: Optimizer) -> PreparedOptimizer:
    # To train with the copy, prepare its `.optimizer`.
    engine: Any = _Alone()
    engine.window = engine
    return PreparedOptimizer(optimizer, engine, Prepared(), Strategy())


# Counting the micro-batches of an optimizer step


class AccumulationWindow:
    """Counter of the micro-batches that accumulate for one optimizer step.

    A plain loop enters each micro-batch by `advance`, and the end of its data loader ends the window. The Trainer,
    which fetches the micro-batches of a step in advance, sets their number with `begin` and enters each by
    `advance_planned`. The count belongs to the loop over one loader: when that loop ends, for any reason, the next
    window starts from zero.

    Attributes:
        plugin: The options.
        sync_gradients: True if the current micro-batch is the last of its window, so that optimizers step.
        size: The number of micro-batches in the current window. Less than `num_steps` if the loader ends earlier.
        planned: True if `begin` has set the number of micro-batches in the current window.
        holds_gradients: True if a backward of the current window has run, so that clearing gradients would lose some.
        is_abandoned: True if gradients remain from a loop that ended before its optimizer step. They are discarded.
        weighted: True if the window's losses have weights, so that no gradient was divided by `size`.
        count: The number of micro-batches entered in the current window. 0 if the next one begins a window.
    """

    def __init__(
        self, plugin: GradientAccumulationPlugin, active: ActiveLoaders, prepared: Prepared, strategy: Strategy
    ) -> None:
        self.plugin = plugin
        self.sync_gradients = True
        self.size = plugin.num_steps
        self.planned = False
        self._active = active
        self._prepared, self._strategy = prepared, strategy
        self.holds_gradients = self.weighted = False
        self._entered = False
        self.is_abandoned = False
        self.count = 0
        self._loader: PreparedLoader | None = None
        active.on_leave.append(self._loop_ended)

    @property
    def is_within(self) -> bool:
        # The last micro-batch of an optimizer step sets `count` to 0.
        return self.count > 0 and self.holds_gradients

    def advance(self) -> None:
        loader = self._active.innermost
        info = loader.current if loader is not None and self.plugin.sync_with_dataloader else None
        if self.count == 0:
            self._discard_abandoned()
            self._loader = loader
            self.holds_gradients = self.weighted = self.planned = False
            self.size = self.plugin.num_steps
            if loader is not None and info is not None and self.plugin.average_short_window:
                # Fewer batches may be left than a full window needs. Their losses are averaged over their own number.
                remaining = loader.remaining
                if remaining is not None:
                    self.size = max(1, min(self.size, remaining))
        self.count += 1
        self._entered = True
        self.sync_gradients = self.count >= self.plugin.num_steps or (info is not None and info.last)
        if self.sync_gradients:
            if self.count != self.size and self.plugin.average_short_window:
                # The loader had no length or reported a wrong one, so the gradients were divided by a wrong number.
                if self.holds_gradients and not self.weighted:
                    self._scale(self.size / self.count)
                self.size = self.count
            self.count = 0

    def begin(self, size: int) -> None:
        if self.is_abandoned:
            self._discard_abandoned()
        self.size = size
        self.planned = self.sync_gradients = True
        self.holds_gradients = self.weighted = False
        self.count = 0

    def advance_planned(self) -> None:
        self.count += 1
        self._entered = True
        self.sync_gradients = self.count == self.size
        if self.sync_gradients:
            self.count = 0

    def end_planned(self) -> None:
        # Gradients of an unfinished step must not leak into the next one.
        if self.count and self.holds_gradients:
            self._abandon()
        self.reset()

    def set_steps(self, num_steps: int) -> None:
        """Change how many micro-batches accumulate for each optimizer step, starting with the next step."""
        plugin = self.plugin
        self.plugin = replace(plugin, num_steps=num_steps)
        if self.count == 0:
            self.size = num_steps

    def mark_backward(self) -> None:
        """Record that a backward pass has run, so that gradients now wait for an optimizer step."""
        # Without `accumulate`, there are no windows, and gradients never belong to an unfinished one.
        self.holds_gradients = self._entered

    def _discard_abandoned(self) -> None:
        # A loop, ended for example by `break`, left gradients without an optimizer step.
        if not self.is_abandoned:
            return
        self.is_abandoned = False
        for model in self._prepared.models:
            self._strategy.gradients.discard(model)
        for optimizer in self._prepared.optimizers:
            if optimizer.holds_abandoned:
                optimizer.holds_abandoned = False
                optimizer.optimizer.zero_grad()

    def _scale(self, factor: float) -> None:
        done: set[int] = set()
        for model in self._prepared.models:
            # Models may share parameters, which must be scaled only once.
            own = [parameter for parameter in model.parameters() if id(parameter) not in done]
            done.update(map(id, own))
            self._strategy.gradients.scale(own, factor, model=model)
        # Optimizers may hold parameters that belong to no prepared model.
        others = (parameter for optimizer in self._prepared.optimizers for parameter in parameters_of(optimizer))
        rest = {id(parameter): parameter for parameter in others if id(parameter) not in done}
        scale_tensors([local_part(each.grad) for each in rest.values() if each.grad is not None], factor)

    def _abandon(self) -> None:
        self.is_abandoned = True
        for optimizer in self._prepared.optimizers:
            optimizer.holds_abandoned = not optimizer.has_stepped and any(
                parameter.grad is not None for parameter in parameters_of(optimizer)
            )

    def _loop_ended(self, loader: PreparedLoader) -> None:
        if loader is self._loader and self.plugin.sync_with_dataloader:
            if self.holds_gradients:
                self._abandon()
            self.reset()

    def reset(self) -> None:
        """Reset the count of accumulated micro-batches to zero."""
        self.count = 0
        self.sync_gradients = True
        self.holds_gradients = self._entered = self.planned = False
        self.size = self.plugin.num_steps
        self._loader = None


# A prepared learning-rate scheduler: steps when its optimizers do


class PreparedScheduler:
    """Learning-rate scheduler returned by `Accelerator.prepare`, which steps only if its optimizers do.

    Args:
        scheduler: The original scheduler, also available as `.scheduler`.
        optimizers: The prepared optimizers. If one of them skipped its step on overflow, the scheduler skips its step
            too.
        window: The counter of micro-batches.
        steps_per_call: The number of scheduler steps per optimizer step. Scripts for plain loops expect one per
            process, because they write schedules for the length of the unsharded loader. A scheduler that watches a
            metric always steps once.
        with_optimizer: False to step at every call, independent of the optimizers.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        window: AccumulationWindow,
        steps_per_call: int = 1,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self._window = window
        self._with_optimizer = with_optimizer
        # A measured metric counts once, not once per process.
        watches = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._steps_per_call = 1 if watches else steps_per_call

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped scheduler, but only if its optimizers have just stepped."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._window.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._steps_per_call):
            # One-cycle schedules raise past their end, which the steps of several processes may overshoot.
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy belongs to no Accelerator and steps at every call.
        return _unprepared_scheduler, (self.scheduler, self._steps_per_call)

    def get_last_lr(self) -> Any:
        """Return the current learning rates of the wrapped scheduler, one per parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped learning-rate scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped learning-rate scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        # While an object is copied, the attribute may not exist yet, and `getattr` below would recurse.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _unprepared_scheduler(scheduler: Any, steps_per_call: int) -> PreparedScheduler:
    always: Any = SimpleNamespace(sync_gradients=True)
    return PreparedScheduler(scheduler, [], always, steps_per_call)


def cover_new_groups(scheduler: Any) -> None:
    for each in _with_parts(scheduler):
        # A group that was added later follows the schedule of the first group, scaled by the current ratio of their
        # learning rates. Otherwise schedulers with values per group, such as `LambdaLR` or `OneCycleLR`, fail at the
        # next step.
        known = getattr(each, "base_lrs", getattr(each, "min_lrs", None))
        optimizer = getattr(each, "optimizer", None)
        if isinstance(known, list) and known and isinstance(optimizer, torch.optim.Optimizer):
            for number in range(len(known), len(optimizer.param_groups)):
                _cover_group(each, optimizer.param_groups, number)


def follow_group_rate(scheduler: Any, number: int) -> None:
    for each in _with_parts(scheduler):
        if isinstance(getattr(each, "base_lrs", None), list):
            # continues from the learning rate that was set in the group
            _cover_group(each, each.optimizer.param_groups, number)


def _cover_group(scheduler: Any, groups: list[dict[str, Any]], number: int) -> None:
    first, group = groups[0], groups[number]
    rate, own = float(first["lr"]), float(group["lr"])
    ratio = own / rate if rate else 1.0
    for name in ("base_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas", "min_lrs"):
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and values:
            # Only learning rates differ between groups. Momentums, factors and minimum rates are copied.
            values[number : number + 1] = [values[0] * ratio if name in ("base_lrs", "max_lrs") else values[0]]
    for key in ("initial_lr", "max_lr", "min_lr"):
        if key in first:
            group[key] = first[key] * ratio
    for key in ("base_momentum", "max_momentum"):
        if key in first:
            group[key] = first[key]


def _with_parts(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    # Schedulers such as `SequentialLR` hold others. Torch 2.13 has no public name for these.
    for part in vars(scheduler).get("_schedulers", ()):
        yield from _with_parts(part)
