"""Preparation: models, optimizers, schedulers and loaders as the processes of a run need them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain.accelerator.building import find_batch_placement, is_scheduler
from drivetrain.accelerator.dynamo_plugin import TorchDynamoPlugin
from drivetrain.accelerator.forward import PrecisionForward, wrap_forward
from drivetrain.accelerator.launched import Launched
from drivetrain.accelerator.optimizer import PreparedOptimizer, unwrap_optimizer
from drivetrain.accelerator.prepared import Prepared, parameters_of
from drivetrain.accelerator.scheduler import PreparedScheduler
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
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import send_to_device
from drivetrain.runtime.seeds import recorded_seed
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import StepModule, Strategy
from drivetrain.strategies.capabilities import Join, join_context
from drivetrain.strategies.optimizer_names import lay_out_state
from drivetrain.strategies.precision import Precision, overrides

FUSED_HINT = "Optimizers are stepped as they were made: give fused=True to the optimizer itself."


@dataclass
class PreparationOptions:
    """How objects are prepared; each may change at any time, for what is prepared from then on.

    Attributes:
        device_placement: Whether models and batches are moved to the device.
        dataloader_config: How loaders are sharded.
        step_scheduler_with_optimizer: Whether schedulers follow the optimizers.
        step_scheduler_per_process: Whether a scheduler steps once per process for each optimizer step, unless
            `split_batches`.
        dynamo_plugin: How models are compiled; as the launcher was asked if None.
    """

    device_placement: bool
    dataloader_config: DataLoaderConfiguration
    step_scheduler_with_optimizer: bool
    step_scheduler_per_process: bool
    dynamo_plugin: TorchDynamoPlugin | None = None


class Preparation:
    """Prepares the objects of a run, records them in `Prepared`, and releases them.

    Args:
        state: This process among its peers.
        strategy: Places models.
        precision: In which number formats they compute.
        step: What prepared optimizers are parts of.
        prepared: What has been prepared.
        active: The loaders that are being iterated.
        options: How objects are prepared.

    Attributes:
        compilation: How models are compiled; None where they are not.
        batch_placement: The strategy's own way of bringing batches over, if it has one.
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
        plugin = options.dynamo_plugin
        self.compilation = Launched.here().compilation if plugin is None else plugin.compilation()
        self.batch_placement = find_batch_placement(strategy, active)
        self._state, self._strategy, self._precision = state, strategy, precision
        self._step, self._prepared, self._active = step, prepared, active

    def objects(self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order; see `Accelerator.prepare`."""
        if device_placement is not None and len(device_placement) != len(objects):
            raise ConfigurationError(
                f"device_placement has {len(device_placement)} entries for {len(objects)} objects; give one for each.",
                code="DT-018",
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
            if is_scheduler(item):
                prepared[index] = self.scheduler(item)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    # models

    def model(self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool) -> nn.Module:
        """Prepare one model; see `Accelerator.prepare_model`."""
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
        if evaluation_mode:
            return self._strategy.place(model, self._precision, move), optimizers
        prepared, stepped = self._strategy.prepare(
            model, [unwrap_optimizer(optimizer) for optimizer in optimizers], self._precision, move
        )
        if self.compilation is not None:
            self.compilation.apply(self._strategy.unwrap(prepared) if not isinstance(model, StepModule) else model)
        self._prepared.models.append(prepared)
        rewrapped = [
            given if isinstance(given, PreparedOptimizer) and given.optimizer is new else new
            for given, new in zip(optimizers, stepped, strict=True)
        ]
        return prepared, rewrapped

    def unwrap_model(self, model: nn.Module, keep_forward: bool, keep_compiled: bool) -> nn.Module:
        """The user's own module.

        Args:
            model: A prepared model.
            keep_forward: Whether its forward keeps running under the precision.
            keep_compiled: Whether one that the user has given to `torch.compile` is returned compiled.
        """
        bare = self._strategy.unwrap(model)
        if not keep_forward:
            PrecisionForward.remove(bare)
        compiled = _compiled_around(bare, model) if keep_compiled else None
        return bare if compiled is None else compiled

    def whole_state(self, model: nn.Module) -> dict[str, Any]:
        """All parameters and buffers of a model; see `Accelerator.get_state_dict`."""
        return self._strategy.state.whole(model)

    # optimizers and schedulers

    def optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Prepare one optimizer, so that it steps where accumulation windows end."""
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
        return prepared

    def scheduler(self, scheduler: Any, steps_per_call: int | None = None) -> PreparedScheduler:
        """Prepare one learning-rate scheduler; see `Accelerator.prepare_scheduler`."""
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
            once = options.dataloader_config.split_batches or not options.step_scheduler_per_process
            steps_per_call = 1 if once else self._state.num_processes
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
        """Prepare one loader; see `Accelerator.prepare_data_loader`."""
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
            if shard.count > 1 and (not config.use_distributed_sampler or is_split_already(data_loader)):
                shard = DataShard()
        prepared = prepare_loader(
            data_loader,
            shard=shard,
            place=place,
            device=(self._state.kind, self._state.device) if moves else None,
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
        """Release a prepared loader, so that the run's state no longer includes it, and end its workers."""
        for inner in getattr(loader, "loaders", [loader]):
            inner.end_workers()
            self._prepared.loaders[:] = [known for known in self._prepared.loaders if known is not inner]

    def default_placement(self) -> Callable[[Any], Any] | None:
        """The function that moves a batch to the device; None on the CPU, where loaders make their batches."""
        kind, device = self._state.kind, self._state.device
        if kind.name == "cpu":
            return None
        non_blocking = self.options.dataloader_config.non_blocking or kind.supports_streams
        return partial(send_to_device, device=device, non_blocking=non_blocking)

    @contextmanager
    def uneven_inputs(self, models: Sequence[nn.Module], even_batches: bool | None) -> Iterator[None]:
        """Context in which processes may have different numbers of batches; see `Accelerator.join_uneven_inputs`."""
        joining = self._strategy.capability(Join)
        if joining is None and self._state.use_distributed:
            warnings.warn(
                f"join_uneven_inputs has no effect with {self._strategy!r}, whose processes must have as many batches.",
                stacklevel=4,
            )
        changed = [loader for loader in self._prepared.loaders if even_batches is not None]
        if any(loader.ends_as_its_stream for loader in changed):
            warnings.warn(
                f"even_batches={even_batches} is only supported for map-style datasets: loaders over iterable datasets "
                "end where their streams do.",
                stacklevel=4,
            )
        before = [loader.tail for loader in changed]
        for loader in changed:
            loader.tail = _tail(even_batches)
        try:
            with join_context(joining, models):
                yield
        finally:
            for loader, tail in zip(changed, before, strict=True):
                loader.tail = tail

    def release(self, objects: Sequence[Any]) -> list[None]:
        """Release everything prepared and give memory back to the device; see `Accelerator.free_memory`."""
        for loader in self._prepared.loaders:
            self._active.leave(loader)
        self._prepared.clear()
        self._step.window.reset()
        gc.collect()
        self._state.kind.empty_cache()
        return [None for _ in objects]

    def _moves(self, device_placement: bool | None) -> bool:
        return self.options.device_placement if device_placement is None else device_placement


def _tail(even_batches: bool | None) -> TailPolicy:
    """What happens at the end of a loader whose number of batches is no multiple of the processes."""
    return TailPolicy.COMPLETE if even_batches else TailPolicy.UNEVEN


def is_spread(model: nn.Module) -> bool:
    """Whether a model, or one inside of it, is on several devices by a map of its own (`hf_device_map`)."""
    return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())


def _compiled_around(bare: nn.Module, model: nn.Module) -> nn.Module | None:
    """What `torch.compile` made of a module, inside or around what was prepared of it; None where nothing did."""
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
