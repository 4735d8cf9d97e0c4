"""What an engine has prepared: the models, optimizers, schedulers and loaders of a run, in the order of preparation."""

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
    """The objects that a run consists of, each list in the order of preparation.

    Attributes:
        models: The modules to call, as the strategy made them.
        optimizers: The optimizers, each over parameters of the models.
        schedulers: The learning-rate schedulers.
        loaders: The sharded loaders.
        registered: Further objects whose state belongs to the run.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)

    def optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        """The bare optimizers that hold any of a model's parameters; all of them where there is one model only."""
        bare = [optimizer.optimizer for optimizer in self.optimizers]
        if len(self.models) == 1:
            return bare
        own = {id(parameter) for parameter in model.parameters()}
        return [one for one in bare if any(id(parameter) in own for parameter in parameters_of(one))]

    def owners_of(self, parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
        """The bare optimizers that hold any of some parameters."""
        wanted = {id(parameter) for parameter in parameters}
        bare = (optimizer.optimizer for optimizer in self.optimizers)
        return [one for one in bare if any(id(parameter) in wanted for parameter in parameters_of(one))]

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped on overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def forget(self, objects: Sequence[Any]) -> None:
        """Leave objects out of the run, by identity; those that were never prepared are ignored."""
        gone = {id(item) for item in objects}
        for group in self._groups():
            group[:] = [item for item in group if id(item) not in gone]

    def forget_model(self, model: nn.Module) -> None:
        """Leave a model out of the run, with the optimizers over nothing but its parameters and their schedulers."""
        own = {id(parameter) for parameter in model.parameters()}
        optimizers = [o for o in self.optimizers if all(id(parameter) in own for parameter in parameters_of(o))]
        gone = {id(optimizer) for optimizer in optimizers}
        schedulers = [s for s in self.schedulers if s.optimizers and all(id(o) in gone for o in s.optimizers)]
        self.forget([model, *optimizers, *schedulers])

    def clear(self) -> None:
        """Leave everything out but what was registered."""
        for group in self._groups():
            group.clear()

    def _groups(self) -> tuple[list[Any], ...]:
        return self.models, self.optimizers, self.schedulers, self.loaders


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# `GradientState`: where an accumulation window and the loaders being iterated are


_GRADIENTS = "gradients"


class GradientState:
    """A view of an engine's accumulation window and of the loaders that it iterates: `accelerator.gradient_state`.

    Made by itself it is a view of the engine that was made last.

    Args:
        gradient_accumulation_plugin: How gradients accumulate, where there is no engine to ask.
        window: The window of an engine.
        active: Its loaders.
    """

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        window: AccumulationWindow | None = None,
        active: ActiveLoaders | None = None,
    ) -> None:
        self._plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self._own = None if window is None or active is None else (weakref.ref(window), weakref.ref(active))
        self._synchronises = True
        if self._own is not None:
            PartialState.registry()[_GRADIENTS] = self._own

    @classmethod
    def _reset_state(cls) -> None:
        """Forget the engine that was made last."""
        PartialState.registry().pop(_GRADIENTS, None)

    def _find(self) -> tuple[AccumulationWindow | None, ActiveLoaders | None]:
        window, active = self._own or PartialState.registry().get(_GRADIENTS) or (_nothing, _nothing)
        return window(), active()

    @property
    def initialized(self) -> bool:
        """Whether there is an engine."""
        return self._find()[0] is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends a window."""
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
        """How gradients accumulate."""
        window, _ = self._find()
        return self._plugin if window is None else window.plugin

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Return the options as a dict; an entry that is assigned holds from the next micro-batch on."""
        return vars(self.plugin)

    @property
    def num_steps(self) -> int:
        """Micro-batches of a window."""
        return self.plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """As the plugin has it."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window."""
        return self.plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are reduced in each micro-batch."""
        return self.plugin.sync_each_batch

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The loader that is being iterated, the innermost of several; None outside of loops."""
        _, active = self._find()
        return None if active is None else active.innermost

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """The loaders that are being iterated, after a None that stands for no loop."""
        _, active = self._find()
        return [None, *(active.loaders if active is not None else [])]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples of all processes in the last step; -1 before, or if unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether an XLA optimizer's step need not reduce gradients: they are when it is called."""
        return True

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def _nothing() -> None:
    return None


# A prepared optimizer: steps only where an accumulation window ends, and records when a step was skipped


class PreparedOptimizer(OptimizerProxy):
    """What `Accelerator.prepare` returns for an optimizer; everything else is the optimizer's own.

    Args:
        optimizer: The user's optimizer, also found under `.optimizer`.
        step: The engine's step, which it is a part of.
        prepared: The models that it is prepared beside.
        strategy: Reduces their gradients over processes.

    Attributes:
        needs_closure: Whether it cannot step without a closure, as L-BFGS.
        step_was_skipped: Whether the last step was skipped on overflow.
        has_stepped: Whether the gradients held have been stepped with.
        holds_abandoned: Whether they are those of a window whose loop was left before its step.
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
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients that are not needed any more; those of the window under way accumulate.

        So it may stand before the backward or after the step, as the loop likes.
        """
        if self.has_stepped or not self._window.holds_gradients:
            self.has_stepped = self.holds_abandoned = False
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, where a window ends.

        Args:
            closure: Computes gradients first; None where they are there already.

        Returns:
            What the closure returned.
        """
        return self._engine_step(self, closure)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters take gradients in the body, as for one side of a GAN.

        Args:
            sync_grad: Whether gradients are reduced over processes in the body.
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
        """Switch to training, for schedule-free optimizers."""
        return self.optimizer.train() if hasattr(self.optimizer, "train") else None

    def eval(self) -> Any:
        """Switch to evaluation, for schedule-free optimizers."""
        return self.optimizer.eval() if hasattr(self.optimizer, "eval") else None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's own state, laid out in memory as its parameters are."""
        self.optimizer.load_state_dict(state_dict)
        lay_out_state(self.optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unprepared_optimizer, (self.optimizer,)


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's own optimizer."""
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


class _Alone:
    """What a copy of a prepared optimizer is part of: no engine, so that it steps whenever it is called."""

    window = None
    holds_gradients = False

    @staticmethod
    def step(prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer."""
        prepared.has_stepped = True
        return prepared.optimizer.step(closure)


def _unprepared_optimizer(optimizer: Optimizer) -> PreparedOptimizer:
    """A prepared optimizer as it comes out of a pickle or a deep copy; prepare its `.optimizer` to train with it."""
    engine: Any = _Alone()
    engine.window = engine
    return PreparedOptimizer(optimizer, engine, Prepared(), Strategy())


# The accumulation window: which micro-batch is this, how many does an optimizer step hold, and is this the last


class AccumulationWindow:
    """Counts the micro-batches of optimizer steps, for a raw loop and for a driver that plans its windows.

    A raw loop enters each micro-batch by `advance`, and the end of its loader ends the window. A driver that has the
    micro-batches of a step at hand sets how many there are (`begin`) and enters each by `advance_planned`. The count
    belongs to the loop over one loader: when that loop ends, however it ends, the next window starts from zero.

    Attributes:
        plugin: The options.
        sync_gradients: Whether the current micro-batch ends a window, so that optimizers step.
        size: Micro-batches of the current window: fewer than `num_steps` where the loader ends before.
        planned: Whether a driver has set how many micro-batches the current window holds.
        holds_gradients: Whether a backward of the current window's earlier or present micro-batches has run, so
            that clearing gradients now would lose some of it.
        is_abandoned: Whether gradients are left of a window whose loop ended before its step; they are discarded.
        weighted: Whether the window's losses have weights, so that no gradient was normalised by `size`.
        count: Micro-batches of the current window that were entered; 0 if the next one begins a window.
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
        """Whether gradients are held of a window that has not ended."""
        return self.count > 0 and self.holds_gradients

    def advance(self) -> None:
        """Enter the next micro-batch of a raw loop."""
        loader = self._active.innermost
        info = loader.current if loader is not None and self.plugin.sync_with_dataloader else None
        if self.count == 0:
            self._discard_abandoned()
            self._loader = loader
            self.holds_gradients = self.weighted = self.planned = False
            self.size = self.plugin.num_steps
            if loader is not None and info is not None and self.plugin.average_short_window:
                remaining = loader.remaining
                if remaining is not None:
                    self.size = max(1, min(self.size, remaining))
        self.count += 1
        self._entered = True
        self.sync_gradients = self.count >= self.plugin.num_steps or (info is not None and info.last)
        if self.sync_gradients:
            if self.count != self.size and self.plugin.average_short_window:
                # The loader had no length, or not the one it reported: what is held was normalised by a wrong number.
                if self.holds_gradients and not self.weighted:
                    self._scale(self.size / self.count)
                self.size = self.count
            self.count = 0

    def begin(self, size: int) -> None:
        """Open a window of a known number of micro-batches."""
        if self.is_abandoned:
            self._discard_abandoned()
        self.size = size
        self.planned = self.sync_gradients = True
        self.holds_gradients = self.weighted = False
        self.count = 0

    def advance_planned(self) -> None:
        """Enter the next micro-batch of a window that `begin` has opened."""
        self.count += 1
        self._entered = True
        self.sync_gradients = self.count == self.size
        if self.sync_gradients:
            self.count = 0

    def end_planned(self) -> None:
        """Leave the windows that a driver planned; gradients that no step was taken with are discarded."""
        if self.count and self.holds_gradients:
            self._abandon()
        self.reset()

    def set_steps(self, num_steps: int) -> None:
        """Change how many micro-batches a window holds, from the next window on."""
        plugin = self.plugin
        self.plugin = replace(plugin, num_steps=num_steps)
        if self.count == 0:
            self.size = num_steps

    def mark_backward(self) -> None:
        """Record that gradients of the current window have been computed."""
        self.holds_gradients = self._entered

    def _discard_abandoned(self) -> None:
        """Clear the gradients of a loop that ended within a window, unless its user has stepped with them."""
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
        """Multiply the gradients, where a window turns out to hold another number of micro-batches than planned."""
        done: set[int] = set()
        for model in self._prepared.models:
            own = [parameter for parameter in model.parameters() if id(parameter) not in done]
            done.update(map(id, own))
            self._strategy.gradients.scale(own, factor, model=model)
        others = (parameter for optimizer in self._prepared.optimizers for parameter in parameters_of(optimizer))
        rest = {id(parameter): parameter for parameter in others if id(parameter) not in done}
        scale_tensors([local_part(each.grad) for each in rest.values() if each.grad is not None], factor)

    def _abandon(self) -> None:
        """Record that a loop has ended: gradients that no step was taken with until then belong to no window."""
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
        """Let the next micro-batch begin a window."""
        self.count = 0
        self.sync_gradients = True
        self.holds_gradients = self._entered = self.planned = False
        self.size = self.plugin.num_steps
        self._loader = None


# A prepared learning-rate scheduler: steps when its optimizers do


class PreparedScheduler:
    """What `Accelerator.prepare` returns for a scheduler.

    Args:
        scheduler: The user's scheduler, also found under `.scheduler`.
        optimizers: The prepared optimizers; a step that one of them skipped on overflow is skipped here too.
        window: The accumulation window.
        steps_per_call: How often the scheduler steps for one optimizer step. Scripts for raw loops count
            on one per process, since they write schedules for the loader as it was before it was sharded. One that
            watches a metric steps once whatever this is: the metric is one, and its patience counts it.
        with_optimizer: Whether to follow the optimizers at all; if not, every call steps once.
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
        watches = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._steps_per_call = 1 if watches else steps_per_call

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the optimizers did."""
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
        # A copy follows no engine: it steps whenever it is called.
        return _unprepared_scheduler, (self.scheduler, self._steps_per_call)

    def get_last_lr(self) -> Any:
        """The learning rates of the last step."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's own state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _unprepared_scheduler(scheduler: Any, steps_per_call: int) -> PreparedScheduler:
    """A prepared scheduler as it comes out of a pickle or a deep copy."""
    always: Any = SimpleNamespace(sync_gradients=True)
    return PreparedScheduler(scheduler, [], always, steps_per_call)


def cover_new_groups(scheduler: Any) -> None:
    """Let a scheduler of torch's step the parameter groups that its optimizer got after the scheduler was made.

    A new group follows the schedule of the first one, in the proportion that their rates have now. Without this a
    schedule that keeps a value for each group, such as `LambdaLR` or `OneCycleLR`, fails at its next step.
    """
    for each in _with_parts(scheduler):
        known = getattr(each, "base_lrs", getattr(each, "min_lrs", None))
        optimizer = getattr(each, "optimizer", None)
        if isinstance(known, list) and known and isinstance(optimizer, torch.optim.Optimizer):
            for number in range(len(known), len(optimizer.param_groups)):
                _cover_group(each, optimizer.param_groups, number)


def follow_group_rate(scheduler: Any, number: int) -> None:
    """Let the schedule of a group continue from the rate that the group was given."""
    for each in _with_parts(scheduler):
        if isinstance(getattr(each, "base_lrs", None), list):
            _cover_group(each, each.optimizer.param_groups, number)


def _cover_group(scheduler: Any, groups: list[dict[str, Any]], number: int) -> None:
    """Give a group the first one's values, those of rates in the proportion of the two rates."""
    first, group = groups[0], groups[number]
    rate, own = float(first["lr"]), float(group["lr"])
    ratio = own / rate if rate else 1.0
    for name in ("base_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas", "min_lrs"):
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and values:
            values[number : number + 1] = [values[0] * ratio if name in ("base_lrs", "max_lrs") else values[0]]
    for key in ("initial_lr", "max_lr", "min_lr"):
        if key in first:
            group[key] = first[key] * ratio
    for key in ("base_momentum", "max_momentum"):
        if key in first:
            group[key] = first[key]


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those that it steps, which torch (2.13) shows under no public name."""
    yield scheduler
    for part in vars(scheduler).get("_schedulers", ()):
        yield from _with_parts(part)
