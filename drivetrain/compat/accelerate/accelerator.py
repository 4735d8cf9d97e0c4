"""`Accelerator` with the arguments and members that only scripts written for Accelerate use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain import accelerator as engine
from drivetrain.compat.accelerate.state import AcceleratorState, GradientState, record_accelerator
from drivetrain.compat.accelerate.utils.dataclasses import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    KwargsHandler,
    TorchDynamoPlugin,
)
from drivetrain.compat.accelerate.utils.other import save
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.errors import ConfigurationError

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]


class Accelerator(engine.Accelerator):
    """`drivetrain.Accelerator` as Accelerate's scripts make and use it.

    Arguments that are listed here are those that `drivetrain.Accelerator` does not take.

    Args:
        device_placement: As there.
        split_batches: As there.
        mixed_precision: As there, or a member of `PrecisionType`.
        gradient_accumulation_steps: As there.
        cpu: As there.
        dataloader_config: As there.
        deepspeed_plugin: As there, or several by name, of which the first is in use.
        fsdp_plugin: As there.
        torch_tp_plugin: Tensor parallelism, before `ParallelismConfig` had it.
        megatron_lm_plugin: As there.
        rng_types: As there.
        log_with: As there.
        project_dir: As there.
        project_config: As there.
        gradient_accumulation_plugin: As there.
        step_scheduler_with_optimizer: As there.
        kwargs_handlers: As there.
        dynamo_backend: A back end of `torch.compile`, with which prepared models are compiled.
        dynamo_plugin: The same with its options.
        deepspeed_plugins: Another name of `deepspeed_plugin`.
        parallelism_config: As there.
        **kwargs: Further arguments of `drivetrain.Accelerator`.

    Raises:
        ConfigurationError: Options contradict each other or cannot run here; the message names what can.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        **kwargs: Any,
    ) -> None:
        deepspeed = deepspeed_plugin if deepspeed_plugin is not None else deepspeed_plugins
        self.deepspeed_plugins = _named(deepspeed)
        deepspeed = next(iter(self.deepspeed_plugins.values())) if self.deepspeed_plugins else None
        if torch_tp_plugin is not None and parallelism_config is None and torch_tp_plugin.tp_size > 1:
            parallelism_config = engine.ParallelismConfig(tp_size=torch_tp_plugin.tp_size)
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise ConfigurationError("dynamo_backend and dynamo_plugin contradict each other; give one.")
        dynamo = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend)
        if fsdp_plugin is None and deepspeed is None and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            fsdp_plugin = FullyShardedDataParallelPlugin()
        self.plugins: dict[str, Any] = {
            "deepspeed": deepspeed,
            "fsdp": fsdp_plugin,
            "megatron": megatron_lm_plugin,
            "dynamo": dynamo,
            "tensor_parallel": torch_tp_plugin,
            "parallelism": parallelism_config,
        }
        handlers, self.own_handlers = _split_handlers(kwargs_handlers)
        plugin = gradient_accumulation_plugin
        super().__init__(
            device_placement,
            split_batches,
            getattr(mixed_precision, "value", mixed_precision),
            gradient_accumulation_steps if plugin is None and gradient_accumulation_steps != 1 else None,
            cpu,
            dataloader_config,
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=None if rng_types is None else [getattr(each, "value", each) for each in rng_types],
            kwargs_handlers=handlers,
            fsdp_plugin=fsdp_plugin,
            deepspeed_plugin=deepspeed,
            parallelism_config=parallelism_config,
            megatron_lm_plugin=megatron_lm_plugin,
            log_with=_tracker_names(log_with),
            **kwargs,
        )
        record_accelerator(self)
        self.state: AcceleratorState = AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """The accumulation window and the loaders in use."""
        return GradientState(accelerator=self)

    # what scripts read

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed options in use; None without."""
        return self.plugins["deepspeed"]

    @property
    def native_amp(self) -> bool:
        """Whether the precision is one that torch's autocast computes."""
        return self.mixed_precision in ("fp16", "bf16")

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one process."""
        return self.use_distributed

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether one process reads the data for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the seed and the epoch decide a loader's order alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders were asked to keep their position; they do anyway."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint with automatic naming."""
        return self.project_configuration.iteration

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the grid of processes; None without."""
        return self.plugins["parallelism"]

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded."""
        return self.plugins["fsdp"] is not None

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the grid of processes and sharding go together."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process holds what is to be saved."""
        return self.is_main_process

    @property
    def fp8_backend(self) -> str | None:
        """Which package computes in fp8; None without."""
        return None if self.mixed_precision != "fp8" else str(getattr(self.precision, "backend", "AO")).upper()

    @property
    def autocast_handler(self) -> Any:
        """The options of autocast that were given."""
        return self._handler(engine.AutocastKwargs)

    @property
    def ddp_handler(self) -> Any:
        """The options of DDP that were given."""
        return self._handler(engine.DistributedDataParallelKwargs)

    @property
    def scaler_handler(self) -> Any:
        """The options of the loss scale that were given."""
        return self._handler(engine.GradScalerKwargs)

    @property
    def init_handler(self) -> Any:
        """The options of the process group that were given."""
        return self._handler(engine.InitProcessGroupKwargs)

    def _handler(self, kind: type) -> Any:
        return next((each for each in self.own_handlers if isinstance(each, kind)), None)

    @property
    def _models(self) -> list[nn.Module]:
        return self.prepared.models

    @property
    def _optimizers(self) -> list[Any]:
        return self.prepared.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self.prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self.prepared.loaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self.prepared.registered

    # what scripts call

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As `drivetrain.Accelerator.prepare_model`, and compiled where that was asked for."""
        dynamo = self.plugins["dynamo"]
        if dynamo.backend != DynamoBackend.NO and not dynamo.disable:
            model.compile(**dynamo.to_kwargs())
        return super().prepare_model(model, device_placement, evaluation_mode)

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Context of a backward whose gradients, with those that have accumulated, are averaged over processes.

        Args:
            model: The prepared model, whose forward ran in `no_sync`.
        """
        yield
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(reduce(parameter.grad, "mean"))

    def _do_sync(self) -> None:
        self.accumulation.advance()

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object on the main process; see `accelerate.utils.save`."""
        save(obj, f, safe_serialization=safe_serialization)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model is spread over several devices."""
        return any(len(getattr(each, "hf_device_map", {})) > 1 for each in model.modules())

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Differentiate and step at once, with an optimizer of lomo's kind."""
        for prepared in self.prepared.optimizers:
            fused = getattr(prepared.optimizer, "optimizer", prepared.optimizer)
            if hasattr(fused, "fused_backward"):
                fused.fused_backward(loss, learning_rate)
                return
        raise ConfigurationError("lomo_backward needs an optimizer with fused_backward; none was prepared.")

    def profile(self, profile_handler: Any = None) -> AbstractContextManager[Any]:
        """Torch's profiler over the body.

        Args:
            profile_handler: Its options; those given in `kwargs_handlers` if None.
        """
        handler = profile_handler or next((each for each in self.own_handlers if hasattr(each, "build")), None)
        profiler: AbstractContextManager[Any] = torch.profiler.profile() if handler is None else handler.build()
        return profiler

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """As `drivetrain.Accelerator.save_state`.

        Args:
            output_dir: As there.
            safe_serialization: Accepted; nothing is pickled.
            **options: As there; what Accelerate hands on to a strategy's own format is ignored.
        """
        return super().save_state(output_dir, **{name: options[name] for name in ("block",) if name in options})

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """As `drivetrain.Accelerator.load_state`.

        Args:
            input_dir: As there.
            load_kwargs: Accepted; nothing is unpickled.
            **options: Accepted; there is one format.
        """
        super().load_state(input_dir)


def _named(plugins: Any) -> dict[str, Any]:
    if plugins is None:
        return {}
    if isinstance(plugins, dict) and all(isinstance(each, DeepSpeedPlugin) for each in plugins.values()):
        return plugins
    return {"default": plugins}


def _split_handlers(handlers: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
    """The handlers that the engine takes, and all of them."""
    given = list(handlers or [])
    taken = [each for each in given if not isinstance(each, KwargsHandler) or _is_engine(each)]
    return taken, given


def _is_engine(handler: Any) -> bool:
    return any(kind.__module__.startswith("drivetrain.accelerator") for kind in type(handler).__mro__)


def _tracker_names(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return [getattr(each, "value", each) for each in given]
    return getattr(given, "value", given)
