"""`Accelerator`: the raw engine that a plain PyTorch loop drives, and that the Trainer drives too."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.accelerator.accumulation import AccumulationWindow
from drivetrain.accelerator.building import (
    make_accumulation,
    make_dataloader_config,
    make_precision,
    make_project,
    make_state,
    set_up_strategy,
)
from drivetrain.accelerator.checkpoints import NumberedCheckpoints
from drivetrain.accelerator.dynamo_plugin import DynamoBackend, TorchDynamoPlugin, make_dynamo_plugin
from drivetrain.accelerator.faces.collectives import Collectives
from drivetrain.accelerator.faces.models import ModelHandling
from drivetrain.accelerator.faces.processes import ProcessControl
from drivetrain.accelerator.faces.saving import StateSaving
from drivetrain.accelerator.faces.status import EngineStatus
from drivetrain.accelerator.faces.tracking import Tracking
from drivetrain.accelerator.forward import autocast_context
from drivetrain.accelerator.given_plugins import Plugins
from drivetrain.accelerator.gradient_state import GradientState
from drivetrain.accelerator.gradients import HeldGradients
from drivetrain.accelerator.handlers import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    checked_handlers,
    find_handler,
    process_options,
)
from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.accelerator.optimizer import PreparedOptimizer
from drivetrain.accelerator.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from drivetrain.accelerator.preparation import FUSED_HINT, Preparation, PreparationOptions
from drivetrain.accelerator.prepared import Prepared
from drivetrain.accelerator.run_state import RunState
from drivetrain.accelerator.scheduler import PreparedScheduler
from drivetrain.accelerator.step import OptimizerStep
from drivetrain.accelerator.tracking import LogWith, RunTracking
from drivetrain.accelerator.trigger import Trigger
from drivetrain.data import (
    ActiveLoaders,
    DataLoaderConfiguration,
    DataShard,
    PreparedLoader,
    TailPolicy,
)
from drivetrain.runtime.deprecation import warn_ignored
from drivetrain.runtime.keywords import KnownKeywords, made_again
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import Given, RunOptions
from drivetrain.strategies.capabilities import ContextParallel, split_context
from drivetrain.strategies.precision import Precision

_ACCUMULATION = "Accelerator(gradient_accumulation_steps)"


class Accelerator(KnownKeywords, EngineStatus, ProcessControl, Collectives, ModelHandling, StateSaving, Tracking):
    """The raw engine under a training loop: four changed lines in a plain PyTorch loop.

    Arguments that are given win over the launcher's environment variables. State belongs to the
    instance: a second Accelerator changes nothing about the first.

    Args:
        device_placement: Whether `prepare` and prepared loaders move models and batches to the device.
        split_batches: Whether a loader's batch is the global one and is split; else each process takes a whole one.
        mixed_precision: A precision's name or a `Precision`; the launcher's `--mixed_precision`, else full.
        gradient_accumulation_steps: Micro-batches per optimizer step; the launcher's, else 1.
        cpu: Run on the CPU even where there is an accelerator.
        dataloader_config: How loaders are sharded.
        strategy: A strategy's name or a `Strategy`; `"auto"` takes the launcher's, else DDP among several processes.
        project_dir: Where the run writes.
        project_config: The same in more detail.
        gradient_accumulation_plugin: Accumulation in more detail; give this or `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: Whether prepared schedulers follow the optimizers.
        step_scheduler_per_process: Whether a prepared scheduler steps once per process for each optimizer step,
            as Accelerate's do (unless `split_batches`); False steps it once.
        rng_types: Accepted for scripts that move over; every loader's order is the same on all processes anyway.
        kwargs_handlers: Option holders in Accelerate's names.
        dynamo_backend: Compile prepared models with this backend of `torch.compile`; `dynamo_plugin` has more.
        dynamo_plugin: How prepared models are compiled.
        deepspeed_plugins: Several of `deepspeed_plugin` by name; the first one places models, until
            `state.select_deepspeed_plugin` selects another.
        torch_tp_plugin: A size of tensor parallelism in Accelerate's older holder; `parallelism_config` has more.
        fsdp_plugin: Options of `strategy="fsdp"` in Accelerate's names, or the keys of its `fsdp_config`.
        deepspeed_plugin: Options of `strategy="deepspeed"` in Accelerate's names, or the keys of its
            `deepspeed_config`.
        parallelism_config: Sizes of the grid of processes in Accelerate's names, also as a dict;
            `strategy=Parallel(...)` has more.
        megatron_lm_plugin: Options of `strategy="megatron"` in Accelerate's names, or the keys of its
            `megatron_lm_config`.
        device: Name of the kind of device, such as `"cuda"`, or of this process's device, such as `"cuda:1"`; found if
            None.
        fused_optimizer: Deprecated, without effect. Give `fused=True` to the optimizer itself.
        log_with: Trackers that `init_trackers` opens: names, objects, several of them, or `"all"`.

    Raises:
        ConfigurationError: Options contradict each other or cannot run here; the message names what can.

    Example:
        ```python
        import torch
        from drivetrain import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for batch in data:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
        ```
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | Precision | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, Any] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | Mapping[str, Any] | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: MegatronLMPlugin | Mapping[str, Any] | None = None,
        rng_types: Sequence[Any] | None = None,
        log_with: LogWith = None,
        *,
        strategy: str | Strategy = "auto",
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        step_scheduler_per_process: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | Mapping[str, Any] | None = None,
        device: str | None = None,
        fused_optimizer: bool | None = None,
    ) -> None:
        warn_ignored("Accelerator", "fused_optimizer", fused_optimizer, FUSED_HINT, since="0.1.0", removed_in="0.3.0")
        handlers = checked_handlers(kwargs_handlers)
        process = PartialState(cpu, device=device, **process_options(find_handler(handlers, InitProcessGroupKwargs)))
        self.project_configuration = make_project(project_dir, project_config)
        self.rng_types = list(rng_types or ["generator"])
        self.profile_handler = find_handler(handlers, ProfileKwargs)
        loading = make_dataloader_config(split_batches, dataloader_config)
        compilation = make_dynamo_plugin(dynamo_backend, dynamo_plugin)
        options = PreparationOptions(
            device_placement, loading, step_scheduler_with_optimizer, step_scheduler_per_process, compilation
        )
        plugins = Plugins.given(
            fsdp_plugin, deepspeed_plugin, deepspeed_plugins, parallelism_config, megatron_lm_plugin, torch_tp_plugin
        )
        self.strategy = set_up_strategy(strategy, plugins, process, handlers)
        self.precision = make_precision(mixed_precision, handlers, process.kind, self.strategy)
        self.state = make_state(self.precision, self.strategy, process, plugins, options.dynamo_plugin)
        accumulation = make_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.strategy.check(RunOptions(self.precision, Given(_ACCUMULATION, accumulation.num_steps)))

        self.active_loaders, self.prepared = ActiveLoaders(), Prepared()
        held = HeldGradients(self.prepared, self.strategy)
        self.accumulation = AccumulationWindow(accumulation, self.active_loaders, held)
        self.gradient_state = GradientState(window=self.accumulation, active=self.active_loaders)
        self.optimizer_step = OptimizerStep(self.strategy, self.precision, self.prepared, self.accumulation)
        self.precision.hold_scale_while(lambda: self.accumulation.holds_gradients)
        engine = (self.state, self.strategy, self.precision)
        self.preparation = Preparation(*engine, self.optimizer_step, self.prepared, self.active_loaders, options)
        self.trigger, self.tracking = Trigger(self.state), RunTracking(self.state, log_with, self.project_configuration)
        numbered = NumberedCheckpoints(self.project_configuration, self.state)
        self.run_state = RunState(*engine, numbered, self.prepared, self.tracking, self.optimizer_step)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        # It stands for this process's run, of which there is one.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process it is made again, with nothing prepared.
        return made_again, (type(self), *self.made_with)

    # prepare

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order.

        Args:
            *objects: Modules, optimizers, DataLoaders and learning-rate schedulers; anything else is returned as it is.
            device_placement: For each object, whether to move it; the instance's own choice where None.

        Returns:
            The prepared objects in the order given; one object alone is not wrapped in a tuple. What is prepared
            already is returned as it is, and a model, optimizer or scheduler that is given again as it was before
            gets what was made of it then.

        Raises:
            ConfigurationError: `device_placement` has another length than the objects.
        """
        return self.preparation.objects(objects, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model.

        Args:
            model: The model.
            device_placement: Whether to move it; the instance's own choice if None.
            evaluation_mode: Place it without wrapping it for training.

        Returns:
            The module to call.
        """
        return self.preparation.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Prepare one optimizer, so that it steps where accumulation windows end."""
        return self.preparation.optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any, *, steps_per_call: int | None = None) -> PreparedScheduler:
        """Prepare one learning-rate scheduler, so that it steps when its optimizer does.

        Args:
            scheduler: The scheduler.
            steps_per_call: How often it steps for one optimizer step; as `step_scheduler_per_process` asks if None.
        """
        return self.preparation.scheduler(scheduler, steps_per_call)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        *,
        tail: TailPolicy | None = None,
        place: Callable[[Any], Any] | None = None,
        shard: DataShard | None = None,
        fill: bool | None = None,
    ) -> PreparedLoader:
        """Prepare one loader: this process's share of exactly the order that the loader has by itself.

        Args:
            data_loader: A DataLoader, or any iterable of batches.
            device_placement: Whether batches are moved to the device; the instance's own choice if None.
            tail: What happens at the end where the number of batches is no multiple of the processes; from
                `even_batches` if None.
            place: Moves one batch to the device, instead of the default.
            shard: Which part of the data is this process's; the strategy's if None.
            fill: Whether a short batch is filled up where the strategy wants batches of one shape; from `even_batches`
                if None.

        Returns:
            The prepared loader.
        """
        return self.preparation.loader(data_loader, device_placement, tail, place, shard, fill)

    def forget_loader(self, loader: Any) -> None:
        """Release a prepared loader, so that the run's state no longer includes it."""
        self.preparation.forget_loader(loader)

    def default_placement(self) -> Callable[[Any], Any] | None:
        """The function that moves a batch to the device; None on the CPU, where loaders make their batches."""
        return self.preparation.default_placement()

    # step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context of one micro-batch: inside it, optimizers step and gradients are reduced only where a window ends.

        Args:
            *models: The prepared models whose gradients accumulate; all of them if none is named.
        """
        return self.optimizer_step.accumulate(models)

    def no_sync(self, model: nn.Module | None) -> AbstractContextManager[None]:
        """Context in which the model's gradients are not reduced over processes."""
        return self.optimizer_step.without_sync(model)

    def backward(self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **kwargs: Any) -> None:
        """Compute gradients: the loss is normalised by the window's micro-batches, scaled, and differentiated.

        With `weight`, the gradients that clipping and the optimizer see are those of the weighted mean over all
        micro-batches of the window and all processes. Give it for every micro-batch, once for each.

        Args:
            loss: The mean loss of this micro-batch, a scalar; with `weight` the sum of its losses.
            weight: What that sum weighs, such as the number of tokens.
            **kwargs: Arguments of `Tensor.backward`.
        """
        self.optimizer_step.backward(loss, weight, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Bring gradients back to their true size, before reading or clipping them.

        Args:
            optimizer: One or several prepared optimizers; all if None.
        """
        self.optimizer_step.unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, where a window ends.

        Returns:
            The total norm before clipping; within a window that of what this process has accumulated, unclipped.
        """
        return self.optimizer_step.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value], where a window ends."""
        self.optimizer_step.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The precision's context, for computations outside a prepared model, such as a loss.

        Args:
            autocast_handler: Options of this context alone; `AutocastKwargs(enabled=False)` computes in full.
        """
        return autocast_context(self.precision, self.state.kind, autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Context of one batch's forward and backward, in which its sequences are split over processes.

        With a strategy that does not split sequences it changes nothing.

        Args:
            buffers: Tensors that hold whole sequences, such as tokens, labels and positions.
            buffer_seq_dims: For each, which dimension is the sequence.
            no_restore_buffers: Those that need not be whole again afterwards.
        """
        return split_context(self.strategy.capability(ContextParallel), buffers, buffer_seq_dims, no_restore_buffers)

    def init_context(self) -> AbstractContextManager[Any]:
        """The strategy's context for building a model in."""
        return self.strategy.init_context()

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Context for a loop in which processes may have different numbers of batches.

        Args:
            joinables: The prepared models.
            even_batches: Overrides the instance's choice for loops that start in the context.
        """
        return self.preparation.uneven_inputs(joinables, even_batches)
