"""`Fabric`, implemented with the Accelerator, for custom training loops."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain.accelerator import Accelerator, PreparedOptimizer
from drivetrain.accelerator.prepared import unwrap_optimizer
from drivetrain.compat.lightning.accelerators import Accelerator as Kind
from drivetrain.compat.lightning.fabric.plugins.environments import ClusterEnvironment
from drivetrain.compat.lightning.fabric.strategy import FabricStrategy
from drivetrain.compat.lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_deprecation, rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.seed import seed_everything
from drivetrain.compat.lightning.fabric.wrappers import (
    BackwardGuard,
    FabricDataLoader,
    FabricModule,
    attach,
    is_wrapped,
)
from drivetrain.compat.lightning.plugins import Precision, usable_on
from drivetrain.compat.lightning.reasons import PLUGIN
from drivetrain.compat.lightning.registry import STRATEGIES
from drivetrain.compat.lightning.spawning import call_spawned
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.data import DataShard
from drivetrain.runtime import observer
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError
from drivetrain.runtime.pytrees import recursively_apply, send_to_device
from drivetrain.strategies import Strategy, started_by_verbs
from drivetrain.strategies.base import StartsProcesses
from drivetrain.strategies.precision.mixed import MixedPrecision
from drivetrain.trackers import Tracker
from drivetrain.trainer import Task
from drivetrain.trainer.setup import make_accelerator

# Mixin of Fabric: collectives


class Processes:
    """Mixin of Fabric with the collectives."""

    accelerator: Accelerator
    _strategy: Any

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process only."""
        self.accelerator.print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Block until all processes reach this call."""
        self._strategy.barrier(name=name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from rank `src` to all processes. Return it."""
        return self._strategy.broadcast(obj, src=src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack tensors of all processes along a new first dimension. One process gets its tensors back unchanged."""
        gather = partial(self._strategy.all_gather, group=group, sync_grads=sync_grads)
        return recursively_apply(gather, self._on_device(data))

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors across all processes."""
        reduce = partial(self._strategy.all_reduce, group=group, reduce_op=reduce_op)
        return recursively_apply(reduce, self._on_device(data))

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Run the `with` body on rank 0 (or local rank 0) before the other ranks."""
        engine = self.accelerator
        first = engine.local_main_process_first() if local else engine.main_process_first()
        with first:
            yield

    def _on_device(self, data: Any) -> Any:
        return send_to_device(data, self._strategy.root_device)


# Mixin of Fabric: backward, clipping, autocast


class Stepping:
    """Mixin of Fabric for backward passes, gradient clipping and autocast."""

    accelerator: Accelerator
    _guard: BackwardGuard
    _strategy: Any

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Run the backward pass of a loss. Use it in place of `loss.backward()`."""
        self._guard.is_inside = True
        try:
            self._strategy.backward(tensor, model and forward_module(model), *args, **kwargs)
        finally:
            self._guard.is_inside = False

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip gradients by value or by norm. Return the norm, or None when clipping by value."""
        if (clip_val is None) is (max_norm is None):
            raise ConfigurationError("clip_gradients takes one of clip_val and max_norm.")
        bare = forward_module(module), unwrap_optimizer(optimizer)
        if clip_val is not None:
            self._strategy.clip_gradients_value(*bare, clip_val=clip_val)
            return None
        norm: Tensor = self._strategy.clip_gradients_norm(
            *bare, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager that runs its body in the run's precision."""
        return self.accelerator.autocast()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context manager that skips gradient synchronization, for gradient accumulation."""
        bare = getattr(module, "_orig_mod", module)
        if not isinstance(bare, FabricModule):
            raise ArgumentTypeError(
                "You need to set up the model first before you can call `fabric.no_backward_sync()`: "
                "model = fabric.setup(model).",
            )
        return self.accelerator.no_sync(forward_module(bare)) if enabled else nullcontext()


def forward_module(module: nn.Module) -> nn.Module:
    """Return the wrapper that the strategy created for a Fabric module. Other modules are returned unchanged."""
    bare = getattr(module, "_orig_mod", module)
    return bare.get_submodule("_forward_module") if isinstance(bare, FabricModule) else module


# Mixin of Fabric: checkpoints


class StateFiles:
    """Mixin of Fabric that saves and loads checkpoints."""

    _strategy: Any

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a dict of modules, optimizers and other values to a checkpoint. Call it on all processes."""
        _check_filter(filter, state)
        self._strategy.save_checkpoint(path=path, state=_unwrapped(state), filter=filter)

    def load(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of `save` into the given modules and optimizers. Return the entries without a target."""
        bare = None if state is None else _unwrapped(state)
        rest: dict[str, Any] = self._strategy.load_checkpoint(
            path=path, state=bare, strict=strict, weights_only=weights_only
        )
        if state is not None and bare is not None:
            for name, value in bare.items():
                if value is not _bare(state[name]):
                    state[name] = value
        return rest

    def load_raw(
        self,
        path: str | os.PathLike[str],
        obj: nn.Module | Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Load a file that holds the state of a single module or optimizer."""
        self._strategy.load_checkpoint(path=path, state=_bare(obj), strict=strict, weights_only=weights_only)


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _bare(value) for name, value in state.items()}


def _bare(value: Any) -> Any:
    """Return the strategy's module or the original optimizer behind Fabric's wrapper."""
    if isinstance(value, nn.Module):
        return forward_module(value)
    return value.optimizer if isinstance(value, PreparedOptimizer) else value


def _check_filter(given: Any, state: Mapping[str, Any]) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(f"save(filter=...) should be a dict of functions by name, given {given!r}.")
    unknown = {name for name in given if name not in state}
    if unknown:
        raise ConfigurationError(
            f"save(filter=...): the keys {unknown} are not present in the state keys {set(state)}."
        )
    for name, keeps in given.items():
        if not callable(keeps):
            raise ArgumentTypeError(
                f"save(filter=...): the value for {name!r} should be a callable, given {keeps!r}. Give a function "
                "(key, value) -> bool."
            )


# Mixin of Fabric: logging and callbacks


class Reporting:
    """Mixin of Fabric for logging and callbacks."""

    accelerator: Accelerator
    _callbacks: list[Any]
    _loggers: list[Any]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log one value."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log several values on the main process."""
        numbers = convert_tensors_to_scalars(dict(metrics))
        if self.accelerator.is_main_process:
            for logger in self._loggers:
                logger.log_metrics(metrics=numbers, step=step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook on every callback that defines it, with the keyword arguments that its signature accepts."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if callable(method):
                method(*args, **_taken(method, kwargs))
            else:
                rank_zero_warn(
                    f"Skipping the callback `{type(callback).__name__}.{hook_name}`: it is a "
                    f"{type(method).__name__}, which cannot be called."
                )


def _taken(method: Callable[..., Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments that a method accepts, or all if its signature is unknown."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return given
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


# Mixin of Fabric: preparation of modules, optimizers and loaders


class Preparing(Reporting):
    """Mixin of Fabric that prepares modules, optimizers and data loaders."""

    _guard: BackwardGuard
    _strategy: Any

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self.accelerator.device

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True
    ) -> Any:
        """Prepare a module together with its optimizers and scheduler."""
        _refuse_prepared("model", "setup", [module])
        _refuse_prepared("optimizer", "setup", optimizers)
        engine = self.accelerator
        placement = [move_to_device, *([None] * len(optimizers))]
        prepared = engine.prepare(module, *optimizers, device_placement=placement)
        forward_module, *stepped = prepared if optimizers else [prepared]
        original = getattr(module, "_orig_mod", module)
        place = self.device if move_to_device else None
        wrapped = FabricModule(forward_module, engine.strategy, original, engine.precision, place, self._guard)
        self._announce_steps(stepped)
        if isinstance(original, Task):
            attach(self, original, wrapped, stepped)
        self.call("on_after_setup", fabric=self, module=wrapped)
        parts = [wrapped, *stepped] if scheduler is None else [wrapped, *stepped, scheduler]
        return tuple(parts) if len(parts) > 1 else wrapped

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> Any:
        """Prepare a module without optimizers."""
        _refuse_prepared("model", "setup_module", [module])
        return self.setup(module, move_to_device=move_to_device)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers of a module that `setup_module` has prepared."""
        _refuse_prepared("optimizer", "setup_optimizers", optimizers)
        prepared = tuple(self.accelerator.prepare_optimizer(each) for each in optimizers)
        self._announce_steps(prepared)
        return prepared if len(prepared) > 1 else prepared[0]

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Prepare data loaders: shard their data across processes and move batches to the device."""
        if not dataloaders:
            raise ConfigurationError("`setup_dataloaders` requires at least one dataloader as input.")
        _refuse_prepared("dataloader", "setup_dataloaders", dataloaders)
        for loader in dataloaders:
            if not isinstance(loader, DataLoader):
                raise ArgumentTypeError(
                    f"Only PyTorch DataLoader are currently supported in `setup_dataloaders`, got a "
                    f"{type(loader).__name__}. Iterate anything else as it is, and move batches with fabric.to_device.",
                )
        shard = None if use_distributed_sampler else DataShard(0, 1)
        place = None if move_to_device else _as_it_is
        device = self.device if move_to_device else None
        prepared = [
            FabricDataLoader(self.accelerator.prepare_data_loader(each, shard=shard, place=place), device)
            for each in dataloaders
        ]
        return prepared if len(prepared) > 1 else prepared[0]

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Create modules in the `with` body on the device, in the run's precision, or sharded by the strategy."""
        context: AbstractContextManager[Any] = self._strategy.module_init_context(empty_init=empty_init)
        return context

    def sharded_model(self) -> AbstractContextManager[Any]:
        """Call `init_module`. Deprecated."""
        rank_zero_deprecation("`Fabric.sharded_model()` is deprecated. Use `Fabric.init_module()`.")
        return self.init_module()

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Create tensors in the `with` body on the device, in the run's precision."""
        context: AbstractContextManager[Any] = self._strategy.tensor_init_context()
        return context

    def to_device(self, obj: Any) -> Any:
        """Move a module, a tensor or a nested structure to this process's device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else send_to_device(obj, self.device)

    def _announce_steps(self, optimizers: Any) -> None:
        """Call the callback hook `on_after_optimizer_step` after each step of these optimizers."""
        if not any(hasattr(each, "on_after_optimizer_step") for each in self._callbacks):
            return
        for prepared in optimizers:

            def announce(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                self.call("on_after_optimizer_step", strategy=self.accelerator.strategy, optimizer=optimizer)

            (prepared.optimizer if isinstance(prepared, PreparedOptimizer) else prepared).register_step_post_hook(
                announce
            )


def _refuse_prepared(kind: str, method: str, objects: Any) -> None:
    for each in objects:
        if is_wrapped(each):
            article = "An" if kind == "optimizer" else "A"
            raise ConfigurationError(
                f"{article} {kind} should be passed only once to the `{method}` method; this one is what it returned.",
            )


def _as_it_is(batch: Any) -> Any:
    return batch


# `Fabric`: Lightning's interface, implemented with the Accelerator


def _nothing(fabric: Fabric) -> None:
    """Do nothing. `launch` calls this if it gets no function."""


class Fabric(Preparing, Stepping, Processes, StateFiles):
    """Lightning's Fabric: devices, processes and precision for a custom training loop.

    Attributes:
        accelerator: The `drivetrain.Accelerator` that runs the loop.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Tracker | Sequence[Tracker] | None = None,
    ) -> None:
        for plugin in plugins if isinstance(plugins, Sequence) else [plugins]:
            if isinstance(plugin, Precision):
                precision = plugin.precision
            elif isinstance(plugin, ClusterEnvironment):
                plugin.publish(devices, num_nodes)
            elif plugin is not None:
                raise ConfigurationError(f"Fabric(plugins={type(plugin).__name__}()) is not taken. {PLUGIN}")
        strategy = STRATEGIES.made(strategy)
        if isinstance(strategy, StrategyMembers):
            if strategy.cluster_environment is not None:
                strategy.cluster_environment.publish(devices, num_nodes)
            precision = strategy.given_precision if precision is None else precision
        kind = accelerator.kind if issubclass(type(accelerator), Kind) else accelerator
        precision = usable_on(kind, precision)
        self._made_with = {"accelerator": kind, "num_nodes": num_nodes, "precision": precision, "callbacks": callbacks}
        self._made_with["loggers"] = loggers
        self._asked = strategy
        self.accelerator = make_accelerator(kind, strategy, devices, num_nodes, precision, 1, False)
        self._strategy: Any = FabricStrategy(self.accelerator)
        self._guard = BackwardGuard(_needs_own_backward(self.accelerator))
        self._callbacks = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks] if callbacks else []
        self._loggers = list(loggers) if isinstance(loggers, Sequence) else [loggers] if loggers else []
        self._loggers = observer.observed(self._loggers)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed the random generators of Python, NumPy and torch. Return the seed."""
        return seed_everything(seed, workers is not False, verbose)

    # this process

    @property
    def strategy(self) -> Any:
        """The strategy, with Lightning's members in addition to its own."""
        return self._strategy

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return int(self._strategy.global_rank)

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return int(self._strategy.local_rank)

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return int(self._strategy.node_rank)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return int(self._strategy.world_size)

    @property
    def is_global_zero(self) -> bool:
        """True on the main process."""
        return self.accelerator.is_main_process

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self._loggers[0]

    # launching

    def launch(self, function: Callable[..., Any] = _nothing, *args: Any, **kwargs: Any) -> Any:
        """Run a function in every process. Starts processes only if the strategy is a spawning one."""
        _check_launched(function, started_by_verbs(self._asked) is not None)
        spawning = self.accelerator.strategy
        if isinstance(spawning, StartsProcesses):
            made_with = {**self._made_with, "strategy": self._asked, "devices": spawning.num_processes}
            return call_spawned(spawning, _launched, type(self), made_with, function, args, kwargs)
        return function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training. Subclasses of `Fabric` override this."""


def _needs_own_backward(engine: Accelerator) -> bool:
    """Return True if a plain `loss.backward()` would skip gradient scaling or work of the strategy."""
    is_own = type(engine.strategy).backward is not Strategy.backward
    return is_own or isinstance(engine.precision, MixedPrecision)


def _launched(
    kind: type[Fabric], made_with: dict[str, Any], function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Create a Fabric and call the function with it. This runs in each process that `launch` starts."""
    return function(kind(**made_with), *args, **kwargs)


def _check_launched(function: Any, spawns: bool) -> None:
    if function is _nothing:
        if spawns:
            raise ArgumentTypeError(
                "Where the strategy starts processes, `launch()` needs to be called with a function for them to run: "
                "fabric.launch(train).",
            )
        return
    if not callable(function):
        raise ArgumentTypeError(
            f"`Fabric.launch(...)` needs to be a callable, got a {type(function).__name__}. Give the function itself: "
            "fabric.launch(train), not fabric.launch(train(fabric))."
        )
    try:
        takes_none = not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if takes_none:
        raise ArgumentTypeError(
            f"The function given to `Fabric.launch(...)` needs to take at least one argument, the Fabric: "
            f"def {getattr(function, '__name__', 'train')}(fabric): ..."
        )
