"""Preparation of models, optimizers, schedulers and loaders for distributed training."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain.accelerator.accelerate_names import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FP8Handler,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    Launched,
    Plugins,
    ProjectConfiguration,
    TorchDynamoPlugin,
    find_handler,
    handler_options,
)
from drivetrain.accelerator.compilation import Compilation
from drivetrain.accelerator.prepared import (
    Prepared,
    PreparedOptimizer,
    PreparedScheduler,
    parameters_of,
    unwrap_optimizer,
)
from drivetrain.accelerator.step import OptimizerStep
from drivetrain.data import (
    ActiveLoaders,
    DataLoaderConfiguration,
    DataShard,
    PreparedLoader,
    SkippingLoader,
    TailPolicy,
    is_split_already,
    prepare_loader,
)
from drivetrain.runtime import observer
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import recursively_apply, send_to_device
from drivetrain.runtime.seeds import recorded_seed
from drivetrain.runtime.state import DistributedType, PartialState
from drivetrain.strategies import StepModule, Strategy, resolve_ddp, resolve_strategy
from drivetrain.strategies.base import Configured, PlacesBatches, joined, lay_out_state, record_names
from drivetrain.strategies.precision import FP8, Float16Mixed, Precision, overrides, resolve_precision
from drivetrain.strategies.precision.mixed import MixedPrecision

# `accelerator.state`: the process state and the settings of one Accelerator


_ENGINE = "engine"


@dataclass
class EngineRecord:
    # describes the Accelerator that was created last, for every `AcceleratorState`
    mixed_precision: str = "no"  # "no" is full precision
    distributed_type: DistributedType | None = None  # None derives it from the processes
    plugins: dict[str, Any] = field(default_factory=dict)
    is_fsdp2: bool = False  # parameters are sharded by torch's `fully_shard`
    configured: Configured | None = None


class AcceleratorState(PartialState):
    """Settings of the Accelerator and facts about this process, available as `accelerator.state`.

    An instance that a script creates shows the Accelerator that was created last. Each Accelerator has its own.

    Args:
        mixed_precision: The expected precision. None accepts any.
        cpu: True to use the CPU, as in `PartialState`.
        **options: Arguments of `PartialState`, and plugins of `Accelerator` for a state created before any Accelerator.

    Raises:
        ConfigurationError: An Accelerator with another precision exists.
    """

    __slots__ = ("engine_record",)

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **options: Any) -> None:
        record: EngineRecord | None = options.pop("record", None)
        plugins = {name: value for name, value in options.items() if name.endswith(("plugin", "config"))}
        super().__init__(cpu, **{name: value for name, value in options.items() if name not in plugins})
        if record is None:
            record = self.registry().get(_ENGINE)
        if record is None:
            named = mixed_precision or Launched().settings.get("mixed_precision", "no")
            record = EngineRecord(named, plugins=plugins)
        elif mixed_precision is not None and mixed_precision != record.mixed_precision:
            raise ConfigurationError(
                f"This process already has an Accelerator with mixed_precision={record.mixed_precision!r}, so "
                f"AcceleratorState cannot use {mixed_precision!r}. Pass it to Accelerator(mixed_precision=...) "
                "instead.",
            )
        object.__setattr__(self, "engine_record", record)
        self.registry()[_ENGINE] = record

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        cls.registry().pop(_ENGINE, None)
        if reset_partial_state:
            super()._reset_state()

    @property
    def record(self) -> EngineRecord:
        try:
            found: EngineRecord = self.engine_record
        except AttributeError:  # an unpickled state has no record
            found = self.registry().get(_ENGINE) or EngineRecord()
        return found

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed setup, such as `MULTI_GPU`, `FSDP` or `DEEPSPEED`.

        A strategy without a member in `DistributedType` is described by its processes.
        """
        return self.record.distributed_type or super().distributed_type

    @property
    def mixed_precision(self) -> str:
        """The selected precision, such as `"bf16"`. It is `"no"` for full precision."""
        return self.record.mixed_precision

    @property
    def deepspeed_plugins(self) -> Any:
        """The argument `deepspeed_plugins` of `Accelerator`: a dict by name, a single plugin, or None."""
        return self.record.plugins.get("deepspeed_plugins")

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed plugin in use, from the script or the launcher.

        None if the run does not use DeepSpeed.
        """
        return self.record.plugins.get("deepspeed_plugin")

    @property
    def fsdp_plugin(self) -> Any:
        """The FSDP plugin in use, from the script or the launcher.

        None if there is no such plugin.
        """
        return self.record.plugins.get("fsdp_plugin")

    @property
    def megatron_lm_plugin(self) -> Any:
        """The `MegatronLMPlugin` that the script or the launcher has configured, or None."""
        return self.record.plugins.get("megatron_lm_plugin")

    @property
    def torch_tp_plugin(self) -> Any:
        """The tensor-parallel plugin that the script has passed to the Accelerator, or None."""
        return self.record.plugins.get("torch_tp_plugin")

    @property
    def dynamo_plugin(self) -> Any:
        """The plugin with the options of `torch.compile` for this run's models.

        None before the script has created an `Accelerator`.
        """
        return self.record.plugins.get("dynamo_plugin")

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the device mesh, from the script or the launcher.

        None if the run has no mesh.
        """
        return self.record.plugins.get("parallelism_config")

    @property
    def device_mesh(self) -> Any:
        """Always None. This property exists only so that existing scripts can read it."""
        return self.record.plugins.get("device_mesh")

    @property
    def is_fsdp2(self) -> bool:
        """True if the run shards parameters with torch's `fully_shard` (FSDP 2)."""
        return self.record.is_fsdp2

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin with the given name, if several were passed to the Accelerator.

        Raises:
            ConfigurationError: No plugin has this name.
        """
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, dict) or name not in plugins:
            named = ", ".join(plugins) if isinstance(plugins, dict) else "none"
            raise ConfigurationError(
                f"There is no DeepSpeed plugin named {name!r}. Existing plugins: {named}. Pass all plugins by name: "
                f"Accelerator(deepspeed_plugins={{name: plugin, ...}}).",
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Select one of several DeepSpeed plugins by name, for the models that are prepared next.

        Objects that are already prepared keep their configuration. `deepspeed_plugin` returns the active plugin.

        Args:
            name: The plugin's key in `Accelerator(deepspeed_plugins=...)`. None changes nothing.

        Raises:
            ConfigurationError: No plugin has this name.
        """
        if name is None:
            return
        self.record.plugins["deepspeed_plugin"] = self.get_deepspeed_plugin(name)
        if self.record.configured is not None:
            self.record.configured.select_configuration(name)

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"


# Running a prepared model's forward under its precision


def autocast_context(
    precision: Precision, kind: DeviceKind, options: AutocastKwargs | None
) -> AbstractContextManager[Any]:
    if options is None:
        return precision.forward_context()
    return precision.autocast(kind, options.enabled, options.cache_enabled)


def under_precision(function: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    if not overrides(precision, "forward_context"):
        return function

    @wraps(function)  # a step function may be marked by an attribute
    def step_in_precision(*args: Any, **kwargs: Any) -> Any:
        with precision.forward_context():
            return function(*args, **kwargs)

    return step_in_precision


class PrecisionForward:
    """Replacement for a module's `forward` that runs it in a mixed or low precision.

    It casts inputs, enters the precision's context, and converts outputs to float32 under mixed precision, so that a
    loss outside the model is computed in float32.
    """

    def __init__(self, forward: Callable[..., Any], precision: Precision) -> None:
        self.forward = forward
        self.precision = precision
        self._casts_inputs = overrides(precision, "convert_batch")
        self._compute = under_precision(forward, precision)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._casts_inputs:
            args, kwargs = self.precision.convert_batch((args, kwargs))
            return self._compute(*args, **kwargs)
        return recursively_apply(torch.Tensor.float, self._compute(*args, **kwargs), test_type=_is_half)

    # Made again for a copy of the module, which is to compute with its own weights.

    def __reduce__(self) -> tuple[Any, ...]:
        return PrecisionForward, (self.forward, self.precision)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrecisionForward:
        return PrecisionForward(deepcopy(self.forward, memo), self.precision)

    @staticmethod
    def remove(model: nn.Module) -> None:
        if isinstance(model.__dict__.get("forward"), PrecisionForward):
            del model.__dict__["forward"]


def wrap_forward(model: nn.Module, precision: Precision) -> None:
    wrapped = model.__dict__.get("forward")
    if isinstance(wrapped, PrecisionForward):
        if wrapped.precision is precision:
            return
        PrecisionForward.remove(model)
    if overrides(precision, "forward_context") or overrides(precision, "convert_batch"):
        # An attribute of the instance shadows the method of its class.
        model.__dict__["forward"] = PrecisionForward(model.forward, precision)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


# Building the parts of an Accelerator from its arguments


logger = get_logger(__name__)


def make_precision(
    spec: str | Precision | None,
    handlers: Sequence[Any],
    launched: Launched,
    strategy: Strategy | None = None,
) -> Precision:
    if observer.current is not None and (observed := observer.current.precision()) is not None:
        return resolve_precision(observed)
    if spec is None:
        # The launcher's choice, if the script has none.
        asked = launched.settings.get("mixed_precision", "no")
        spec = None if asked == "no" else asked  # which configuration files have if nothing was chosen
    if isinstance(strategy, Configured):
        spec = strategy.choose_precision(spec)
    scaling, casting = find_handler(handlers, GradScalerKwargs), find_handler(handlers, AutocastKwargs)
    recipes = find_handler(handlers, FP8Handler)
    if isinstance(spec, Precision):
        for handler in (scaling, casting, recipes):
            if handler is not None:
                raise ConfigurationError(
                    f"{type(handler).__name__} cannot be combined with mixed_precision={spec!r}, because this object "
                    "has its own options. Pass the options to it, for example Float16Mixed(init_scale=1024.0).",
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
    if isinstance(strategy, Configured):
        return strategy.accelerate_name(precision)
    return "no" if precision.name == "32" else precision.name


def backend_of(precision: Precision) -> str | None:
    # None if torch itself computes in this precision
    return getattr(getattr(precision, "backend", None), "name", None)


def set_up_strategy(
    spec: str | Strategy, plugins: Plugins, launched: Launched, process: PartialState, handlers: Sequence[Any]
) -> Strategy:
    observed: Strategy | None = None if observer.current is None else observer.current.strategy()
    if observed is not None:
        observed.setup(process)
        return observed
    # A name or an object wins over the launcher, and a plugin must not contradict a name.
    asked = (plugins.fsdp_plugin, plugins.deepspeed_plugin, plugins.parallelism_config, plugins.megatron_lm_plugin)
    chosen: str | Strategy = spec
    options = find_handler(handlers, DistributedDataParallelKwargs)
    given = launched.strategy_with(*asked) if any(plugin is not None for plugin in asked) else None
    if given is not None:
        if spec not in ("auto", given.name):
            raise ConfigurationError(
                f"strategy={spec!r} contradicts a plugin, which selects {given!r}. Pass only one of them."
            )
        chosen = given
    elif spec == "auto" and (of_launcher := launched.strategy()) is not None:
        chosen = of_launcher
        if options is not None:
            logger.warning_once(
                "DistributedDataParallelKwargs has no effect, because the launcher selects the strategy "
                f"{of_launcher.name!r}."
            )
            options = None
    if options is None:
        strategy = resolve_strategy(chosen, process.environment, process.kind)
        kind = process.kind
        # A subclass of a supported strategy is supported too.
        names = {getattr(parent, "name", None) for parent in type(strategy).__mro__}
        if kind.strategies and not names & {*kind.strategies}:
            raise ConfigurationError(
                f"strategy={strategy.name!r} cannot run on {kind.name!r} devices. Use "
                f"strategy={' or '.join(map(repr, kind.strategies))}, or another device, such as "
                "Accelerator(cpu=True) or Trainer(accelerator='cpu').",
            )
    else:
        given_as, named = "DistributedDataParallelKwargs", options.strategy_options()
        strategy = resolve_ddp(chosen, process.environment, given_as, **named)
    strategy.setup(process)
    if isinstance(strategy, Configured) and plugins.deepspeed_plugins:
        for name, other in plugins.each_deepspeed(launched).items():
            strategy.add_configuration(name, other)
        strategy.select_configuration(next(iter(plugins.deepspeed_plugins)))
    return strategy


# Member of DistributedType for each strategy. Other strategies get the member that describes their processes.
_TYPES = {
    "fsdp": DistributedType.FSDP,
    "deepspeed": DistributedType.DEEPSPEED,
    "megatron": DistributedType.MEGATRON_LM,
    "xla": DistributedType.XLA,
}


def make_state(
    precision: Precision,
    strategy: Strategy,
    process: PartialState,
    plugins: Plugins,
    launched: Launched,
    dynamo: TorchDynamoPlugin | None,
) -> AcceleratorState:
    shown = {name: value for name, value in vars(plugins).items() if value is not None}
    if launched.settings:
        asked = {
            "fsdp_plugin": launched.fsdp,
            "deepspeed_plugin": launched.deepspeed,
            "megatron_lm_plugin": launched.megatron,
            "parallelism_config": launched.parallelism,
        }
        shown = {**asked, **shown}
    shown["dynamo_plugin"] = dynamo or TorchDynamoPlugin()
    # A strategy that derives from another is called as that one.
    names = [getattr(base, "name", None) for base in type(strategy).__mro__]
    kind = next((_TYPES[name] for name in names if name in _TYPES), process.distributed_type)
    record = EngineRecord(accelerate_name(precision, strategy), kind, shown, kind is DistributedType.FSDP)
    record.configured = strategy if isinstance(strategy, Configured) and plugins.deepspeed_plugins else None
    return AcceleratorState(record=record)


def make_project(
    directory: str | os.PathLike[str] | None, configuration: ProjectConfiguration | None
) -> ProjectConfiguration:
    given = None if directory is None else os.fspath(directory)
    if configuration is None:
        return ProjectConfiguration(project_dir=given)
    if given is not None and configuration.project_dir is None:
        configuration.project_dir = given
        configuration.logging_dir = configuration.logging_dir or given
    elif given is not None and given != configuration.project_dir:
        raise ConfigurationError(
            f"project_dir={given!r} contradicts project_config, whose project_dir is {configuration.project_dir!r}. "
            "Pass only one of them.",
        )
    return configuration


def make_dataloader_config(split_batches: bool, given: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    if given is None:
        return DataLoaderConfiguration(split_batches=split_batches)
    if split_batches and not given.split_batches:
        raise ConfigurationError(
            "split_batches=True contradicts dataloader_config.split_batches, which is False. Set it in "
            "dataloader_config only.",
        )
    return replace(given)  # the instance's own, which `even_batches` may change


def make_accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None, launched: Launched
) -> GradientAccumulationPlugin:
    if plugin is not None and steps is not None and steps != plugin.num_steps:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin, whose num_steps is "
            f"{plugin.num_steps}. Pass only one of them.",
        )
    if plugin is not None:
        return plugin
    return GradientAccumulationPlugin(
        launched.settings.get("gradient_accumulation_steps", 1) if steps is None else steps
    )


def is_scheduler(item: Any) -> bool:
    """Return True if an object is a learning-rate scheduler, judged by its class or its methods."""
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau):
        return True
    # transformers' and others' schedulers that do not subclass torch's
    return type(item).__name__ == "AcceleratedScheduler" or (
        not isinstance(item, nn.Module | Optimizer)
        and all(hasattr(item, name) for name in ("step", "get_last_lr", "state_dict", "load_state_dict"))
        and not isinstance(item, PreparedScheduler)
    )


FUSED_HINT = "Optimizers are stepped as they were made: give fused=True to the optimizer itself."


@dataclass
class PreparationOptions:
    """Settings of `Accelerator.prepare`, such as whether models are compiled and moved to the device.

    Changes apply to objects that are prepared later.

    Attributes:
        device_placement: True to move models and batches to the device.
        dataloader_config: Settings for sharding data loaders over processes.
        step_scheduler_with_optimizer: True if schedulers step together with their optimizers.
        step_scheduler_per_process: True if a scheduler steps once per process for each optimizer step, unless
            `split_batches` is set.
        compilation: Options for compiling models, or None.
    """

    device_placement: bool
    dataloader_config: DataLoaderConfiguration
    step_scheduler_with_optimizer: bool
    step_scheduler_per_process: bool
    compilation: Compilation | None = None


class Preparation:
    """Implementation of `Accelerator.prepare`, which wraps models, optimizers, loaders and schedulers.

    Attributes:
        compilation: Options for compiling models, or None.
        batch_placement: The strategy's own function for moving batches to the device, or None.
    """

    def __init__(
        self,
        state: PartialState,
        strategy: Strategy,
        precision: Precision,
        step: OptimizerStep,
        prepared: Prepared,
        active: ActiveLoaders,
        options: PreparationOptions,
    ) -> None:
        self.options = options
        self.compilation = options.compilation
        self.batch_placement = placement = strategy.batch_placement if isinstance(strategy, PlacesBatches) else None
        if placement is not None:
            active.on_leave.append(lambda loader: placement.finish())
        self._state, self._strategy, self._precision = state, strategy, precision
        self._step, self._prepared, self._active = step, prepared, active

    def objects(self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None) -> Any:
        if device_placement is not None and len(device_placement) != len(objects):
            raise ConfigurationError(
                f"device_placement has {len(device_placement)} entries for {len(objects)} objects. Pass one entry for "
                "each object.",
            )
        placement = list(device_placement or [None] * len(objects))
        prepared: list[Any] = list(objects)
        optimizers = [(i, o) for i, o in enumerate(objects) if isinstance(o, Optimizer)]
        # Models take their optimizers along, since a strategy may replace the parameters they hold.
        for index, item in enumerate(objects):
            if isinstance(item, nn.Module):
                own = {id(parameter) for parameter in item.parameters()}
                mine = [(i, o) for i, o in optimizers if any(id(p) in own for p in parameters_of(o))]
                prepared[index], stepped = self._model_with(item, [o for _, o in mine], placement[index])
                for (i, _), optimizer in zip(mine, stepped, strict=True):
                    prepared[i] = optimizer
        for index, item in enumerate(prepared):
            if isinstance(item, Optimizer):
                prepared[index] = self.optimizer(item)
            elif isinstance(item, DataLoader):
                prepared[index] = self.loader(item, placement[index])
        for index, item in enumerate(prepared):
            # Last, because a scheduler looks up the prepared wrapper of its optimizer.
            if is_scheduler(item):
                prepared[index] = self.scheduler(item)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    # models

    def model(self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool) -> nn.Module:
        return self._model_with(model, [], device_placement, evaluation_mode)[0]

    def _model_with(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        device_placement: bool | None,
        evaluation_mode: bool = False,
    ) -> tuple[nn.Module, list[Optimizer]]:
        for known in self._prepared.models:
            if model is known:
                return known, optimizers
            if model is self._strategy.unwrap(known):
                wrap_forward(model, self._precision)
                return known, optimizers
        if not isinstance(model, StepModule):  # whose steps open the precision themselves
            wrap_forward(model, self._precision)
        move = self._moves(device_placement)
        # Not added to the prepared objects, so that checkpoints do not include the model.
        if evaluation_mode:
            return self._strategy.prepare(model, None, self._precision, move)[0], optimizers
        bare = [unwrap_optimizer(optimizer) for optimizer in optimizers]
        prepared, stepped = self._strategy.prepare(model, bare, self._precision, move)
        if self.compilation is not None:
            self.compilation.apply(self._strategy.unwrap(prepared) if not isinstance(model, StepModule) else model)
        self._prepared.models.append(prepared)
        if observer.current is not None:
            observer.current.model(prepared)
        rewrapped = [
            given if isinstance(given, PreparedOptimizer) and given.optimizer is new else new
            for given, new in zip(optimizers, stepped, strict=True)
        ]
        return prepared, rewrapped

    def unwrap_model(self, model: nn.Module, keep_forward: bool, keep_compiled: bool) -> nn.Module:
        """Return the user's original module from a prepared model."""
        bare = self._strategy.unwrap(model)
        if not keep_forward:
            PrecisionForward.remove(bare)
        compiled = _compiled_wrapper(bare, model) if keep_compiled else None
        return bare if compiled is None else compiled

    def whole_state(self, model: nn.Module) -> dict[str, Any]:
        # All processes must call this.
        return self._strategy.state.model(model, full=True, everywhere=True)

    # optimizers and schedulers

    def optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        for known in self._prepared.optimizers:
            if known.optimizer is optimizer:
                return known
        lay_out_state(optimizer)
        if overrides(self._precision, "check_trained"):
            bare = [self._strategy.unwrap(model) for model in self._prepared.models]
            names = {id(each): name for model in bare for name, each in model.named_parameters()}
            self._precision.check_trained(optimizer, names)
        stepped = self._precision.prepare_optimizer(optimizer)
        prepared = PreparedOptimizer(stepped, self._step, self._prepared, self._strategy)
        self._prepared.optimizers.append(prepared)
        for model in self._prepared.models:
            record_names(self._strategy.unwrap(model), stepped)
        return prepared

    def scheduler(self, scheduler: Any, steps_per_call: int | None = None) -> PreparedScheduler:
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        for known in self._prepared.schedulers:
            if known.scheduler is scheduler:
                return known
        own = unwrap_optimizer(scheduler.optimizer) if hasattr(scheduler, "optimizer") else None
        followed = [
            optimizer for optimizer in self._prepared.optimizers if optimizer.optimizer is own
        ] or self._prepared.optimizers
        options = self.options
        if steps_per_call is None:
            # With sharded loaders, a schedule written for one process would otherwise advance too slowly.
            once = options.dataloader_config.split_batches or not options.step_scheduler_per_process
            processes = self._state.num_processes
            if observer.current is not None:
                processes = observer.current.processes(processes)
            steps_per_call = 1 if once else processes
        prepared = PreparedScheduler(
            scheduler,
            followed,
            self._step.window,
            steps_per_call=steps_per_call,
            with_optimizer=options.step_scheduler_with_optimizer,
        )
        self._prepared.schedulers.append(prepared)
        return prepared

    # loaders

    def loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        tail: TailPolicy | None = None,
        place: Callable[[Any], Any] | None = None,
        shard: DataShard | None = None,
        fill: bool | None = None,
    ) -> PreparedLoader:
        if isinstance(data_loader, PreparedLoader | SkippingLoader):
            return cast("PreparedLoader", data_loader)
        config = self.options.dataloader_config
        moves = self._moves(device_placement)
        own = self.batch_placement
        copies = place is None and own is None
        place = place or (self.default_placement() if moves else None)
        if own is not None and place is not None:
            place = own.around(place)
        if shard is None:
            shard = self._strategy.topology.data_shard
            # Data that the script has already split, for example with a DistributedSampler, must not be split again.
            if shard.count > 1 and (not config.use_distributed_sampler or is_split_already(data_loader)):
                shard = DataShard()
        prepared = prepare_loader(
            data_loader,
            shard=shard,
            place=place,
            device=(self._strategy.topology.kind, self._strategy.topology.device) if moves else None,
            sends_ahead=copies,
            config=config,
            tail=_tail(config.even_batches) if tail is None else tail,
            seed=recorded_seed(),
            active=self._active,
            fill=own is not None and (config.even_batches if fill is None else fill),
        )
        self._prepared.loaders.append(prepared)
        return prepared

    def forget_loader(self, loader: Any) -> None:
        for inner in getattr(loader, "loaders", [loader]):
            inner.end_workers()
            self._prepared.loaders[:] = [known for known in self._prepared.loaders if known is not inner]

    def default_placement(self) -> Callable[[Any], Any] | None:
        kind, device = self._strategy.topology.kind, self._strategy.topology.device
        if kind.name == "cpu":
            return None
        non_blocking = self.options.dataloader_config.non_blocking or kind.supports_streams
        return partial(send_to_device, device=device, non_blocking=non_blocking)

    @contextmanager
    def uneven_inputs(self, models: Sequence[nn.Module], even_batches: bool | None) -> Iterator[None]:
        joining = joined(self._strategy, models)
        if joining is None and self._state.use_distributed:
            warnings.warn(
                f"join_uneven_inputs has no effect with {self._strategy!r}: all processes must have the same number "
                "of batches.",
                stacklevel=4,
            )
        changed = [loader for loader in self._prepared.loaders if even_batches is not None]
        if any(loader.ends_as_its_stream for loader in changed):
            warnings.warn(
                f"even_batches={even_batches} has no effect on loaders of iterable datasets, which end when their "
                "data ends. It is only supported for map-style datasets.",
                stacklevel=4,
            )
        before = [loader.tail for loader in changed]
        for loader in changed:
            loader.tail = _tail(even_batches)
        try:
            with joining or nullcontext():
                yield
        finally:
            for loader, tail in zip(changed, before, strict=True):
                loader.tail = tail

    def release(self, objects: Sequence[Any]) -> list[None]:
        """Release all prepared objects and free cached device memory. Return None for each of `objects`."""
        for loader in self._prepared.loaders:
            self._active.leave(loader)
        self._prepared.clear()
        self._step.window.reset()
        gc.collect()
        self._strategy.topology.kind.empty_cache()
        return [None for _ in objects]

    def _moves(self, device_placement: bool | None) -> bool:
        return self.options.device_placement if device_placement is None else device_placement


def _tail(even_batches: bool | None) -> TailPolicy:
    return TailPolicy.COMPLETE if even_batches else TailPolicy.UNEVEN


def is_spread(model: nn.Module) -> bool:
    """Return True if a model or a submodule is spread over several devices by a `device_map`."""
    return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())


def _compiled_wrapper(bare: nn.Module, model: nn.Module) -> nn.Module | None:
    # `bare` is the user's module, inside the prepared `model`.
    while model is not bare:
        inner = getattr(model, "_orig_mod", None)
        if inner is bare:
            return model
        if inner is not None:  # compiled after it was wrapped
            return type(model)(bare, model.dynamo_ctx)
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return None
