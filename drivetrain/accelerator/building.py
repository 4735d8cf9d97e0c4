"""Building the parts of an Accelerator from its arguments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.accelerator.dynamo_plugin import TorchDynamoPlugin
from drivetrain.accelerator.engine_state import AcceleratorState, EngineRecord
from drivetrain.accelerator.fp8_handlers import FP8Handler
from drivetrain.accelerator.given_plugins import Plugins
from drivetrain.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    find_handler,
    handler_options,
)
from drivetrain.accelerator.launched import Launched
from drivetrain.accelerator.scheduler import PreparedScheduler
from drivetrain.data import ActiveLoaders, DataLoaderConfiguration
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import Strategy, resolve_ddp, resolve_strategy
from drivetrain.strategies.accelerate_names import distributed_type_of, is_fully_sharded
from drivetrain.strategies.capabilities import BatchPlacement, Configurations, ConfiguredPrecision
from drivetrain.strategies.precision import FP8, Float16Mixed, Precision, resolve_precision
from drivetrain.strategies.precision.mixed import MixedPrecision

logger = get_logger(__name__)


def choose_strategy(spec: str | Strategy, plugin: Strategy | None) -> str | Strategy:
    """The strategy asked for, by its own name or by one of Accelerate's plugins."""
    if plugin is None:
        return spec
    if spec not in ("auto", plugin.name):
        raise ConfigurationError(
            f"strategy={spec!r} contradicts a plugin, which asks for {plugin!r}. Give one.", code="DT-004"
        )
    return plugin


def make_strategy(spec: str | Strategy, state: PartialState, options: DistributedDataParallelKwargs | None) -> Strategy:
    """The strategy asked for, else the launcher's, with DDP's options in Accelerate's holder."""
    launched = Launched.here().strategy() if spec == "auto" else None
    if isinstance(launched, Strategy):
        if options is not None:
            logger.warning_once(
                f"DistributedDataParallelKwargs change nothing: the launcher was asked for {launched.name!r}."
            )
        spec, options = launched, None
    if options is None:
        chosen = resolve_strategy(spec, state.environment, state.kind)
        _check_device(chosen, state)
        return chosen
    return resolve_ddp(spec, state.environment, "DistributedDataParallelKwargs", **options.strategy_options())


def _check_device(strategy: Strategy, state: PartialState) -> None:
    """Refuse a strategy that cannot run on this kind of device."""
    allowed = state.kind.strategies
    names = {getattr(parent, "name", None) for parent in type(strategy).__mro__}
    if allowed and not names & {*allowed}:
        raise ConfigurationError(
            f"strategy={strategy.name!r} cannot run on {state.kind.name!r} devices. Use "
            f"{' or '.join(repr(name) for name in allowed)}, or another device: cpu=True, Trainer(accelerator='cpu').",
            code="DT-022",
        )


def find_batch_placement(strategy: Strategy, active: ActiveLoaders) -> BatchPlacement | None:
    """The strategy's own way of bringing batches over, if it has one, which ends where a loop over a loader ends."""
    placement = strategy.capability(BatchPlacement)
    if placement is not None:
        finish = placement.finish
        active.on_leave.append(lambda loader: finish())
    return placement


def make_precision(
    spec: str | Precision | None,
    handlers: Sequence[Any],
    kind: DeviceKind | None = None,
    strategy: Strategy | None = None,
) -> Precision:
    """Make the precision asked for, else the launcher's, else that of the strategy's own configuration.

    Args:
        spec: A precision or its name; None if the script names none.
        handlers: Accelerate's holders of options.
        kind: The kind of device that it computes on.
        strategy: The strategy of the run.
    """
    precision = _precision_of(spec, handlers, strategy)
    if kind is not None:
        precision.setup(kind)
    return precision


def _precision_of(spec: str | Precision | None, handlers: Sequence[Any], strategy: Strategy | None) -> Precision:
    launched = Launched.here()
    if spec is None:
        asked = launched.settings.get("mixed_precision", "no")
        spec = None if asked == "no" else asked  # which `accelerate config` writes if nothing was chosen
    configured = None if strategy is None else strategy.capability(ConfiguredPrecision)
    if configured is not None:
        spec = configured.choose(spec)
    scaling, casting = find_handler(handlers, GradScalerKwargs), find_handler(handlers, AutocastKwargs)
    recipes = find_handler(handlers, FP8Handler)
    if isinstance(spec, Precision):
        for handler in (scaling, casting, recipes):
            if handler is not None:
                raise ConfigurationError(
                    f"{type(handler).__name__} are options of a precision given by its name, but mixed_precision is "
                    f"{spec!r} already. Give them to it, as in Float16Mixed(init_scale=1024.0).",
                    code="DT-070",
                )
        return spec
    precision = resolve_precision(spec)
    if isinstance(precision, FP8):
        recipe = launched.fp8_config
        precision = recipes.precision() if recipes is not None else FP8.from_config(recipe) if recipe else precision
    if not isinstance(precision, MixedPrecision):
        return precision
    if isinstance(precision, Float16Mixed):
        precision = Float16Mixed(**handler_options(scaling))
    if casting is not None:
        precision.cache_enabled, precision.enabled = casting.cache_enabled, casting.enabled
    return precision


def accelerate_name(precision: Precision, strategy: Strategy) -> str:
    """Return a precision's name in Accelerate's words, where full precision is `"no"`."""
    configured = strategy.capability(ConfiguredPrecision)
    if configured is not None:
        return configured.accelerate_name(precision)
    return "no" if precision.name == "32" else precision.name


def backend_of(precision: Precision) -> str | None:
    """Which package computes a precision, such as `"torchao"`; None where torch itself does."""
    return getattr(getattr(precision, "backend", None), "name", None)


def set_up_strategy(spec: str | Strategy, plugins: Plugins, process: PartialState, handlers: Sequence[Any]) -> Strategy:
    """The strategy asked for, by its name, a plugin or the launcher, in its place among the processes."""
    chosen = choose_strategy(spec, plugins.strategy(Launched.here()))
    strategy = make_strategy(chosen, process, find_handler(handlers, DistributedDataParallelKwargs))
    strategy.setup(process)
    process.before_leaving(strategy.teardown)
    several = strategy.capability(Configurations)
    if several is not None and plugins.deepspeed_plugins:
        for name, other in plugins.each_deepspeed(Launched.here()).items():
            several.add(name, other)
        several.select(next(iter(plugins.deepspeed_plugins)))
    return strategy


def make_state(
    precision: Precision, strategy: Strategy, process: PartialState, plugins: Plugins, dynamo: TorchDynamoPlugin | None
) -> AcceleratorState:
    """What `accelerator.state` is: the process, and what the engine was made with."""
    launched = Launched.here()
    asked = {
        "fsdp_plugin": launched.fsdp,
        "deepspeed_plugin": launched.deepspeed,
        "megatron_lm_plugin": launched.megatron,
        "parallelism_config": launched.parallelism,
    }
    given = {**asked, **plugins.by_name(), "dynamo_plugin": dynamo or TorchDynamoPlugin()}
    kind = distributed_type_of(strategy, process.distributed_type)
    record = EngineRecord(accelerate_name(precision, strategy), kind, given, is_fully_sharded(strategy))
    record.configurations = strategy.capability(Configurations) if plugins.deepspeed_plugins else None
    return AcceleratorState(record=record)


def make_project(
    directory: str | os.PathLike[str] | None, configuration: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Where the run writes."""
    given = None if directory is None else os.fspath(directory)
    if configuration is None:
        return ProjectConfiguration(project_dir=given)
    if given is not None and configuration.project_dir is None:
        configuration.project_dir = given
        configuration.logging_dir = configuration.logging_dir or given
    elif given is not None and given != configuration.project_dir:
        raise ConfigurationError(
            f"project_dir={given!r} contradicts project_config, which says {configuration.project_dir!r}. Give one.",
            code="DT-004",
        )
    return configuration


def make_dataloader_config(split_batches: bool, given: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """How loaders are sharded."""
    if given is None:
        return DataLoaderConfiguration(split_batches=split_batches)
    if split_batches and not given.split_batches:
        raise ConfigurationError(
            "split_batches=True contradicts dataloader_config, whose split_batches is False. Set it there.",
            code="DT-004",
        )
    return replace(given)  # the instance's own, which `even_batches` may change


def make_accumulation(steps: int | None, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """How gradients accumulate: as asked for, else as the launcher was started."""
    if plugin is not None and steps is not None and steps != plugin.num_steps:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin, which says "
            f"{plugin.num_steps}. Give one of the two.",
            code="DT-004",
        )
    if plugin is not None:
        return plugin
    launched = Launched.here().settings.get("gradient_accumulation_steps", 1) if steps is None else steps
    return GradientAccumulationPlugin(launched)


def is_scheduler(item: Any) -> bool:
    """Whether an object is a learning-rate scheduler."""
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau):
        return True
    # transformers' and others' schedulers that do not subclass torch's
    return type(item).__name__ == "AcceleratedScheduler" or (
        not isinstance(item, nn.Module | Optimizer)
        and all(hasattr(item, name) for name in ("step", "get_last_lr", "state_dict", "load_state_dict"))
        and not isinstance(item, PreparedScheduler)
    )
