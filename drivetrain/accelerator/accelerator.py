"""`Accelerator`: the raw engine that a plain PyTorch loop drives, and that the Trainer drives too."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain import checkpoint
from drivetrain.accelerator.accumulation import AccumulationWindow
from drivetrain.accelerator.checkpoints import NumberedCheckpoints
from drivetrain.accelerator.control import ProcessControl
from drivetrain.accelerator.forward import PrecisionForward, wrap_forward
from drivetrain.accelerator.gradients import HeldGradients
from drivetrain.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    check_handlers,
    find_handler,
    handler_options,
)
from drivetrain.accelerator.metrics import gather_real_rows
from drivetrain.accelerator.optimizer import PreparedOptimizer, parameters_of, unwrap_optimizer
from drivetrain.accelerator.scheduler import PreparedScheduler
from drivetrain.accelerator.state_hooks import HookHandle, LoadHook, SaveHook, StateHooks
from drivetrain.data import (
    ActiveLoaders,
    DataLoaderConfiguration,
    DataShard,
    PreparedLoader,
    SkippingLoader,
    TailPolicy,
    prepare_loader,
)
from drivetrain.data import skip_first_batches as skip_first_batches_of
from drivetrain.runtime import collectives
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.nested import send_to_device
from drivetrain.runtime.seeds import RandomState, recorded_seed
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import DDP, Strategy, resolve_strategy
from drivetrain.strategies.base import move_optimizer_state
from drivetrain.strategies.precision import Float16Mixed, Precision, overrides, resolve_precision
from drivetrain.strategies.precision.mixed import MixedPrecision


class Accelerator(ProcessControl):
    """The raw engine under a training loop: four changed lines in a plain PyTorch loop.

    Arguments that are given win over the launcher's environment variables. State belongs to the
    instance: a second Accelerator changes nothing about the first.

    Args:
        device_placement: whether `prepare` and prepared loaders move models and batches to the device.
        split_batches: whether a loader's batch is the global one and is split; else each process takes a whole one.
        mixed_precision: a precision's name or a `Precision`; the launcher's `--mixed_precision`, else full.
        gradient_accumulation_steps: micro-batches per optimizer step; the launcher's, else 1.
        cpu: run on the CPU even where there is an accelerator.
        dataloader_config: how loaders are sharded.
        strategy: a strategy's name or a `Strategy`; `"auto"` takes DDP among several processes, else single.
        project_dir: where the run writes.
        project_config: the same in more detail.
        gradient_accumulation_plugin: accumulation in more detail; give this or `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: whether prepared schedulers follow the optimizers.
        step_scheduler_per_process: whether a prepared scheduler steps once per process for each optimizer step,
            as Accelerate's do (unless `split_batches`); False steps it once.
        rng_types: accepted for scripts that move over; every loader's order is the same on all processes anyway.
        kwargs_handlers: option holders in Accelerate's names.
        device: name of the kind of device, such as `"cuda"`; found if None.

    Raises:
        ConfigurationError: options contradict each other or cannot run here; the message says what can.

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
        *,
        strategy: str | Strategy = "auto",
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        step_scheduler_per_process: bool = True,
        rng_types: Sequence[str] | None = None,
        kwargs_handlers: Sequence[Any] | None = None,
        device: str | None = None,
    ) -> None:
        handlers = list(kwargs_handlers or [])
        check_handlers(handlers)
        self.state = PartialState(cpu, device=device, **handler_options(find_handler(handlers, InitProcessGroupKwargs)))
        self.project_configuration = _make_project(project_dir, project_config)
        self._numbered = NumberedCheckpoints(self.project_configuration, self.state)
        self._state_hooks = StateHooks()
        self.device_placement = device_placement
        self.dataloader_config = _make_dataloader_config(split_batches, dataloader_config)
        self.rng_types = list(rng_types or ["generator"])
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.step_scheduler_per_process = step_scheduler_per_process

        self.strategy = _make_strategy(strategy, self.state, find_handler(handlers, DistributedDataParallelKwargs))
        self.strategy.setup(self.state)
        self.state.before_leaving(self.strategy.teardown)
        self.precision = _make_precision(mixed_precision, handlers)
        self.precision.setup(self.state.kind)
        self.strategy.check_precision(self.precision)

        self.active_loaders = ActiveLoaders()
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self.accumulation = AccumulationWindow(
            _make_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin),
            self.active_loaders,
            HeldGradients(self._models, self._optimizers),
        )
        self.precision.hold_scale_while(lambda: self.accumulation.holds_gradients)
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[PreparedLoader] = []
        self._registered: list[Any] = []
        self._clips_unscaled = overrides(self.precision, "unscale")
        self._trigger = False

    # what is this run

    @property
    def mixed_precision(self) -> str:
        """Name of the precision; full precision is `"no"`, as in Accelerate."""
        return "no" if self.precision.name == "32" else self.precision.name

    @property
    def kind(self) -> DeviceKind:
        """The kind of device that this run is on."""
        return self.state.kind

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends an accumulation window."""
        return self.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.accumulation.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accumulation.plugin.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.accumulation.set_steps(value)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is the global one."""
        return self.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets as many batches, the tail completed with rows that metrics drop."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the precision, if it has one."""
        return getattr(self.precision, "scaler", None)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped on overflow."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def project_dir(self) -> str | None:
        """Where the run writes."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    # prepare

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order.

        Args:
            *objects: modules, optimizers, DataLoaders and learning-rate schedulers; anything else is returned as it is.
            device_placement: for each object, whether to move it; the instance's own choice where None.

        Returns:
            The prepared objects in the order given; one object alone is not wrapped in a tuple. What is prepared
            already is returned as it is, and a model, optimizer or scheduler that is given again as it was before
            gets what was made of it then.

        Raises:
            ConfigurationError: `device_placement` has another length than the objects.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise ConfigurationError(
                f"device_placement has {len(device_placement)} entries for {len(objects)} objects; give one for each."
            )
        placement = list(device_placement or [None] * len(objects))
        prepared: list[Any] = list(objects)
        optimizers = [(i, o) for i, o in enumerate(objects) if isinstance(o, Optimizer)]
        # Models take their optimizers along, since a strategy may replace the parameters they hold.
        for index, item in enumerate(objects):
            if isinstance(item, nn.Module):
                own = {id(parameter) for parameter in item.parameters()}
                mine = [(i, o) for i, o in optimizers if any(id(p) in own for p in parameters_of(o))]
                prepared[index], stepped = self._prepare_model_with(item, [o for _, o in mine], placement[index])
                for (i, _), optimizer in zip(mine, stepped, strict=True):
                    prepared[i] = optimizer
        for index, item in enumerate(prepared):
            if isinstance(item, Optimizer):
                prepared[index] = self.prepare_optimizer(item, placement[index])
            elif isinstance(item, DataLoader):
                prepared[index] = self.prepare_data_loader(item, placement[index])
        for index, item in enumerate(prepared):
            if _is_scheduler(item):
                prepared[index] = self.prepare_scheduler(item)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model.

        Args:
            model: the model.
            device_placement: whether to move it; the instance's own choice if None.
            evaluation_mode: place it without wrapping it for training.

        Returns:
            The module to call.
        """
        return self._prepare_model_with(model, [], device_placement, evaluation_mode)[0]

    def _prepare_model_with(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> tuple[nn.Module, list[Optimizer]]:
        for known in self._models:
            if model is known or model is self.strategy.unwrap(known):
                return known, optimizers
        wrap_forward(model, self.precision)
        if evaluation_mode:
            return self.strategy.place(model, self.precision), optimizers
        with _kept_in_place(model, self.device_placement if device_placement is None else device_placement):
            prepared, stepped = self.strategy.prepare(
                model, [unwrap_optimizer(optimizer) for optimizer in optimizers], self.precision
            )
        self._models.append(prepared)
        rewrapped = [
            given if isinstance(given, PreparedOptimizer) and given.optimizer is new else new
            for given, new in zip(optimizers, stepped, strict=True)
        ]
        return prepared, rewrapped

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Prepare one optimizer, so that it steps where accumulation windows end."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        for known in self._optimizers:
            if known.optimizer is optimizer:
                return known
        move_optimizer_state(optimizer)
        self.precision.prepare_optimizer(optimizer)
        prepared = PreparedOptimizer(optimizer, self)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one learning-rate scheduler, so that it steps when its optimizer does."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        for known in self._schedulers:
            if known.scheduler is scheduler:
                return known
        own = unwrap_optimizer(scheduler.optimizer) if hasattr(scheduler, "optimizer") else None
        followed = [optimizer for optimizer in self._optimizers if optimizer.optimizer is own] or self._optimizers
        per_process = self.step_scheduler_per_process and not self.split_batches
        prepared = PreparedScheduler(
            scheduler,
            followed,
            self.accumulation,
            steps_per_call=self.num_processes if per_process else 1,
            with_optimizer=self.step_scheduler_with_optimizer,
        )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        *,
        tail: TailPolicy | None = None,
        place: Callable[[Any], Any] | None = None,
        shard: DataShard | None = None,
    ) -> PreparedLoader:
        """Prepare one loader: this process's share of exactly the order that the loader has by itself.

        Args:
            data_loader: a DataLoader, or any iterable of batches.
            device_placement: whether batches are moved to the device; the instance's own choice if None.
            tail: what happens at the end where batches do not divide; from `even_batches` if None.
            place: moves one batch to the device, instead of the default.
            shard: which part of the data is this process's; the strategy's if None.

        Returns:
            The prepared loader.
        """
        if isinstance(data_loader, PreparedLoader | SkippingLoader):
            return cast("PreparedLoader", data_loader)
        if tail is None:
            tail = TailPolicy.COMPLETE if self.even_batches else TailPolicy.UNEVEN
        moves = self.device_placement if device_placement is None else device_placement
        prepared = prepare_loader(
            data_loader,
            shard=shard or self.strategy.data_shard,
            place=place or (self._default_place() if moves else None),
            device=(self.kind, self.device) if moves else None,
            config=self.dataloader_config,
            tail=tail,
            seed=recorded_seed(),
            active=self.active_loaders,
        )
        self._loaders.append(prepared)
        return prepared

    def forget_loader(self, loader: Any) -> None:
        """Let go of a prepared loader, so that it is no part of the run's state any more."""
        for inner in getattr(loader, "loaders", [loader]):
            self._loaders[:] = [known for known in self._loaders if known is not inner]

    def _default_place(self) -> Callable[[Any], Any] | None:
        """Moves a batch to the device; None on the CPU, where loaders make their batches anyway."""
        if self.kind.name == "cpu":
            return None
        device, non_blocking = self.device, self.dataloader_config.non_blocking or self.kind.supports_streams
        return lambda batch: send_to_device(batch, device, non_blocking)

    # step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context of one micro-batch: inside it, optimizers step and gradients are reduced only where a window ends.

        Args:
            *models: the prepared models whose gradients accumulate; all of them if none is named.
        """
        self.accumulation.advance()
        if self.accumulation.sync_gradients or self.accumulation.plugin.sync_each_batch:
            return nullcontext()
        return self._without_sync(models or tuple(self._models))

    def no_sync(self, model: nn.Module | None) -> AbstractContextManager[None]:
        """Context in which the model's gradients are not reduced over processes."""
        return self._without_sync(() if model is None else (model,))

    @contextmanager
    def _without_sync(self, models: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.strategy.gradient_sync(model, enabled=False))
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients: the loss is divided by the window's micro-batches, scaled, and differentiated.

        Args:
            loss: the mean loss of this micro-batch, a scalar.
            **kwargs: for `Tensor.backward`.
        """
        size = self.accumulation.size
        if size > 1:
            loss = self.precision.scale(loss / size)
            self.accumulation.note_backward()
        else:
            loss = self.precision.scale(loss)
        self.strategy.backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Bring gradients back to their true size, before reading or clipping them.

        Args:
            optimizer: one or several prepared optimizers; all if None.
        """
        chosen = self._optimizers if optimizer is None else optimizer
        for one in [chosen] if isinstance(chosen, Optimizer) else chosen:
            self.precision.unscale(unwrap_optimizer(one))

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Scale gradients down to a total norm of at most `max_norm`, where a window ends.

        Returns:
            The total norm before clipping; None within a window, where nothing is clipped.
        """
        if not self.accumulation.sync_gradients:
            return None
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._clips_unscaled:
            self._unscale_owners(given)
        return self.strategy.clip_grad_norm_(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value], where a window ends."""
        if not self.accumulation.sync_gradients:
            return
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._clips_unscaled:
            self._unscale_owners(given)
        self.strategy.clip_grad_value_(given, clip_value)

    def _unscale_owners(self, parameters: list[torch.Tensor]) -> None:
        """Unscale the optimizers that hold any of the parameters: the others may have no gradients yet."""
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self._optimizers:
            if any(id(parameter) in wanted for parameter in parameters_of(optimizer)):
                self.precision.unscale(optimizer.optimizer)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The precision's context, for computations outside a prepared model, such as a loss.

        Args:
            autocast_handler: options of this context alone; `AutocastKwargs(enabled=False)` computes in full.
        """
        if autocast_handler is None:
            return self.precision.forward_context()
        enabled = autocast_handler.enabled and isinstance(self.precision, MixedPrecision)
        return torch.autocast(
            self.kind.autocast_type,
            dtype=self.precision.param_dtype if enabled else None,
            enabled=enabled,
            cache_enabled=autocast_handler.cache_enabled,
        )

    def init_context(self) -> AbstractContextManager[Any]:
        """The strategy's context for building a model in."""
        return self.strategy.init_context()

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Context for a loop in which processes may have different numbers of batches.

        Args:
            joinables: the prepared models.
            even_batches: overrides the instance's choice for loops that start in the context.
        """
        return self._joined(joinables, even_batches)

    @contextmanager
    def _joined(self, joinables: Sequence[nn.Module], even_batches: bool | None) -> Iterator[None]:
        changed = [loader for loader in self._loaders if even_batches is not None]
        before = [loader.tail for loader in changed]
        for loader in changed:
            loader.tail = TailPolicy.COMPLETE if even_batches else TailPolicy.UNEVEN
        try:
            with self.strategy.join(joinables):
                yield
        finally:
            for loader, tail in zip(changed, before, strict=True):
                loader.tail = tail

    # collectives

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of all processes along the first dimension, on every process."""
        return collectives.gather(tensor)

    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        *,
        loader: PreparedLoader | SkippingLoader | None = None,
    ) -> Any:
        """Gather per-sample values of the current batch, without the rows that only pad it.

        A tensor is per-sample where its first dimension is the batch's number of rows; others are gathered whole.

        Args:
            input_data: nested structure of tensors, and of lists that hold one object (a string, say) per sample.
            use_gather_object: gather as objects even where all are tensors.
            loader: whose batch this is, where several loaders are iterated at once.

        Returns:
            The real rows of all processes, in the order of the plain loader.
        """
        if isinstance(loader, SkippingLoader):
            loader = loader.whole
        source = self.active_loaders if loader is None else loader
        return gather_real_rows(input_data, source, self.num_processes, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors of all processes elementwise: `"sum"`, `"mean"`, `"max"`, `"min"` or `"none"`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors of all processes to the largest size along one dimension."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag on this process that `check_trigger` sees on all."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process raised the flag; lowers it."""
        flag = torch.tensor(int(self._trigger), device=self.device)
        self._trigger = False
        return bool(collectives.reduce(flag, "max").item())

    # models and state

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: whether its forward keeps running under the precision.
            keep_torch_compile: accepted; a compiled module is returned as its original.
        """
        bare = self.strategy.unwrap(model)
        if not keep_fp32_wrapper:
            PrecisionForward.remove(bare)
        return bare

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All parameters and buffers under their canonical names, whole, on the CPU, on the main process."""
        return self.strategy.full_state_dict(model)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects with the run.

        Raises:
            ConfigurationError: one has no `state_dict` and `load_state_dict`.
        """
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ConfigurationError(
                    f"{type(item).__name__} cannot be registered for checkpointing: it needs state_dict() and "
                    "load_state_dict(state)."
                )
        self._registered.extend(objects)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a prepared model's weights as safetensors, as `safetensors` and `transformers` open them.

        Call it on all processes.

        Args:
            model: a prepared model.
            save_directory: the directory, which gets `model.safetensors`, or several files and an index.
            max_shard_size: bytes in a file at most, such as `"5GB"`.
            safe_serialization: accepted; weights are never pickled.
        """
        weights = self.strategy.full_state_dict(model)
        if self.is_main_process:
            checkpoint.save_safetensors(weights, save_directory, max_shard_size)
        self.wait_for_everyone()

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """Call a function before `save_state` writes.

        Args:
            hook: called on every process as `hook(models, weights, output_dir)` with the prepared models and their
                state dicts, and a directory that becomes the checkpoint: what it writes there is part of it. What it
                takes out of `weights` is not saved again.

        Returns:
            A handle whose `remove()` takes it back.
        """
        return self._state_hooks.add_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """Call a function before `load_state` loads.

        Args:
            hook: called on every process as `hook(models, input_dir)`. What it takes out of `models` is not loaded.

        Returns:
            A handle whose `remove()` takes it back.
        """
        return self._state_hooks.add_load(hook)

    @property
    def save_queue(self) -> checkpoint.SaveQueue:
        """What writes checkpoints; `check()` raises what has failed in the background, `finish()` waits."""
        return checkpoint.save_queue(self.state)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *, block: bool = True) -> str:
        """Write models, optimizers, schedulers, loss scale, loader positions and random states.

        Call it on all processes. The directory appears complete or not at all.

        Args:
            output_dir: the checkpoint's directory or URL; numbered under `project_dir/checkpoints` with automatic
                naming.
            block: whether to return only when it is there. Else the state is copied and written while training goes
                on; what fails then is raised by the next `save_state`, by `save_queue.check()` or `.finish()`.

        Returns:
            The directory.

        Raises:
            CheckpointError: it could not be written; raised on all processes.
        """
        directory = os.fspath(self._numbered.next() if output_dir is None else output_dir)
        shared, extra = self._shared_state(), None
        if self._state_hooks.on_save:
            extra = checkpoint.extra_place(directory, self.state)
            for hook in self._state_hooks.on_save:
                hook(list(self._models), shared["models"], extra)
            self.wait_for_everyone()
        own = self._process_state()
        pending = checkpoint.save_run_state(directory, shared, own, self.state, block=block, extra=extra)
        if output_dir is None:
            self._numbered.note_written(Path(directory), pending)
        return directory

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> None:
        """Load what `save_state` wrote into what is prepared now, in the same order of preparation.

        Loaders take up their positions: the next iteration goes on with the next sample.

        Args:
            input_dir: the checkpoint's directory; with automatic naming the latest one if None.

        Raises:
            CheckpointError: there is none, or it is of other objects than those that are prepared.
        """
        directory = os.fspath(self._numbered.latest() if input_dir is None else input_dir)
        self.save_queue.finish()
        models = list(self._models)
        for hook in self._state_hooks.on_load:
            hook(models, directory)
        shared, own = self.read_checkpoint(directory)
        here: dict[str, Sequence[Any]] = {
            "models": models,
            "optimizers": self._optimizers,
            "schedulers": self._schedulers,
            "registered": self._registered,
        }
        for kind, objects in here.items():
            if kind not in shared:
                raise CheckpointError(
                    f"The checkpoint at {directory} has no {kind}: it was not written by Accelerator.save_state. A "
                    "Trainer's is loaded with Trainer.fit(ckpt_path=...)."
                )
            if len(shared[kind]) != len(objects):
                what = "objects registered for checkpointing" if kind == "registered" else kind
                raise CheckpointError(
                    f"The checkpoint at {directory} holds {len(shared[kind])} {what}, but here are {len(objects)}. "
                    "Prepare and register the same objects, in the same order, before load_state."
                )
        for model, state in zip(models, shared["models"], strict=True):
            self.strategy.load_model_state(model, state)
        for optimizer, state in zip(self._optimizers, shared["optimizers"], strict=True):
            self.strategy.load_optimizer_state(self._owner(optimizer), optimizer.optimizer, state)
        for scheduler, state in zip(self._schedulers, shared["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for loader, state in zip(self._loaders, shared["loaders"], strict=False):
            loader.load_state_dict(state)
        for item, state in zip(self._registered, shared["registered"], strict=True):
            item.load_state_dict(state)
        self.precision.load_state_dict(shared["precision"])
        self.restore_random_state(own)
        self._numbered.note_loaded(Path(directory))

    def registered_state(self) -> list[dict[str, Any]]:
        """The state of what `register_for_checkpointing` was given."""
        return [item.state_dict() for item in self._registered]

    def load_registered_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Give what was registered its state back.

        Raises:
            CheckpointError: another number of objects was registered when it was saved.
        """
        if len(states) != len(self._registered):
            raise CheckpointError(
                f"The checkpoint holds {len(states)} registered objects, but {len(self._registered)} are registered "
                "now. Call register_for_checkpointing with the same ones, in the same order."
            )
        for item, state in zip(self._registered, states, strict=True):
            item.load_state_dict(state)

    def adopt_model(self, model: nn.Module) -> None:
        """Take a model that the strategy has prepared already into account, as that of a Trainer."""
        if not any(model is known for known in self._models):
            self._models.append(model)

    def write_checkpoint(
        self,
        directory: str | os.PathLike[str],
        shared: dict[str, Any],
        own: dict[str, Any] | None = None,
        *,
        step: int | None = None,
        block: bool = True,
    ) -> checkpoint.PendingSave:
        """Write a checkpoint; call it on all processes.

        Args:
            directory: the checkpoint's directory, or a URL.
            shared: what is the same on all processes.
            own: what is this process's own, beside its random state.
            step: the optimizer step, by which the newest checkpoint is found.
            block: whether to return only when it is durable; else it is written while training goes on.

        Returns:
            The save; done already where `block` is set.
        """
        state = {**self._process_state(), **(own or {})}
        return checkpoint.save_run_state(directory, shared, state, self.state, step=step, block=block)

    def read_checkpoint(
        self, directory: str | os.PathLike[str], into: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Read what `write_checkpoint` wrote.

        Args:
            directory: the checkpoint's directory, or a URL.
            into: a part of the shared state whose tensors are filled in place.

        Returns:
            The shared state, and this process's own; None where another number of processes wrote it.
        """
        return checkpoint.load_run_state(directory, self.state, into=into)

    def restore_random_state(self, own: dict[str, Any] | None) -> None:
        """Give this process the random state that `write_checkpoint` kept, if there is one."""
        if own is not None and own["random"] is not None:
            RandomState.from_state_dict(own["random"]).restore()

    def _shared_state(self) -> dict[str, Any]:
        return {
            "models": [self.strategy.model_state(model) for model in self._models],
            "optimizers": [
                self.strategy.optimizer_state(self._owner(optimizer), optimizer.optimizer)
                for optimizer in self._optimizers
            ],
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "loaders": [_position_of(loader) for loader in self._loaders],
            "registered": [item.state_dict() for item in self._registered],
            "precision": self.precision.state_dict(),
        }

    def _process_state(self) -> dict[str, Any]:
        return {"random": RandomState.capture().state_dict()}

    def _owner(self, optimizer: PreparedOptimizer) -> nn.Module:
        """The prepared model whose parameters an optimizer holds; all of them, where it holds several models'."""
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        owners = [model for model in self._models if any(id(p) in held for p in model.parameters())]
        if len(owners) == 1:
            return owners[0]
        return nn.ModuleList(self.strategy.unwrap(model) for model in owners)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippingLoader:
        """A view of a loader that leaves out the first batches, without reading their data; for a resumed epoch.

        After `load_state` it changes nothing, since the loader resumes at its exact position by itself.
        """
        return skip_first_batches_of(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared and give memory back to the device.

        Args:
            *objects: the caller's references, to be overwritten with what is returned.

        Returns:
            A None for each object: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        for loader in self._loaders:
            self.active_loaders.leave(loader)
        for group in (self._models, self._optimizers, self._schedulers, self._loaders):
            group.clear()
        self.accumulation.reset()
        freed: list[None] = [None for _ in objects]
        del objects
        gc.collect()
        self.kind.empty_cache()
        return freed

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Leave the process group, after waiting for the peers. Only needed where a script goes on alone."""
        self.state.destroy_process_group()


def _make_strategy(
    spec: str | Strategy, state: PartialState, options: DistributedDataParallelKwargs | None
) -> Strategy:
    if options is None:
        return resolve_strategy(spec, state.environment)
    if spec not in ("auto", "ddp"):
        raise ConfigurationError(
            f"DistributedDataParallelKwargs are options of strategy='ddp', but strategy={spec!r} was given."
        )
    if not state.use_distributed:
        return resolve_strategy("auto", state.environment)
    return DDP(**options.strategy_options())


def _make_precision(spec: str | Precision | None, handlers: Sequence[Any]) -> Precision:
    if spec is None:
        spec = os.environ.get("DRIVETRAIN_MIXED_PRECISION", "no")
    scaling, casting = find_handler(handlers, GradScalerKwargs), find_handler(handlers, AutocastKwargs)
    if isinstance(spec, Precision):
        for handler in (scaling, casting):
            if handler is not None:
                raise ConfigurationError(
                    f"{type(handler).__name__} are options of a precision given by its name, but mixed_precision is "
                    f"{spec!r} already. Give them to it, as in Float16Mixed(init_scale=1024.0)."
                )
        return spec
    precision = resolve_precision(spec)
    if not isinstance(precision, MixedPrecision):
        return precision
    if isinstance(precision, Float16Mixed):
        precision = Float16Mixed(**handler_options(scaling))
    if casting is not None:
        precision.cache_enabled, precision.enabled = casting.cache_enabled, casting.enabled
    return precision


def _make_project(
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
            f"project_dir={given!r} contradicts project_config, which says {configuration.project_dir!r}. Give one."
        )
    return configuration


def _make_dataloader_config(split_batches: bool, given: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    if given is None:
        return DataLoaderConfiguration(split_batches=split_batches)
    if split_batches and not given.split_batches:
        raise ConfigurationError(
            "split_batches=True contradicts dataloader_config, whose split_batches is False. Set it there."
        )
    return replace(given)  # the instance's own, which `even_batches` may change


def _position_of(loader: PreparedLoader) -> dict[str, Any]:
    """A loader's position; after the last batch of an epoch that is the start of the next one.

    Scripts that count their batches go on with the next epoch there, and must not find it used up.
    """
    position = loader.state_dict()
    if loader.reached_end and not loader.resumes and position["batches"]:
        position.update(epoch=position["epoch"] + 1, consumed=0, batches=0, start=None)
    return position


def _make_accumulation(steps: int | None, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    if plugin is not None and steps is not None and steps != plugin.num_steps:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin, which says "
            f"{plugin.num_steps}. Give one of the two."
        )
    if plugin is not None:
        return plugin
    asked = os.environ.get("DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS", "1") if steps is None else steps
    try:
        return GradientAccumulationPlugin(int(asked) if isinstance(asked, str) else asked)
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS={asked!r} is not a whole number.") from None


def _is_scheduler(item: Any) -> bool:
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau):
        return True
    # transformers' and others' schedulers that do not subclass torch's
    return type(item).__name__ == "AcceleratedScheduler" or (
        not isinstance(item, nn.Module | Optimizer)
        and all(hasattr(item, name) for name in ("step", "get_last_lr", "state_dict", "load_state_dict"))
        and not isinstance(item, PreparedScheduler)
    )


@contextmanager
def _kept_in_place(model: nn.Module, moves: bool) -> Iterator[None]:
    """Keep `Strategy.place` from moving a model whose user places it by hand."""
    if moves:
        yield
        return

    def to_dtype(*args: Any, **kwargs: Any) -> nn.Module:
        dtype = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), None)
        return model if dtype is None else nn.Module.to(model, dtype=dtype)

    model.__dict__["to"] = to_dtype
    try:
        yield
    finally:
        del model.__dict__["to"]
