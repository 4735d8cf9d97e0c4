"""`Accelerator` with the members that only scripts written for Accelerate use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from drivetrain import accelerator as engine
from drivetrain.accelerator.preparation import PrecisionForward
from drivetrain.accelerator.run_state import LoadHook, SaveHook
from drivetrain.compat.accelerate.data_loader import SkipDataLoader, shown_as_prepared, skip_first_batches
from drivetrain.compat.accelerate.members import ReadMembers
from drivetrain.compat.accelerate.optimizer import AcceleratedOptimizer
from drivetrain.compat.accelerate.scheduler import AcceleratedScheduler
from drivetrain.compat.accelerate.state import DEVICE_VARIABLE, AcceleratorState, GradientState, record_accelerator
from drivetrain.compat.accelerate.utils.dataclasses import GradientAccumulationPlugin
from drivetrain.compat.accelerate.utils.fsdp_plugin import FullyShardedDataParallelPlugin
from drivetrain.compat.accelerate.utils.other import without_wrappers
from drivetrain.data import DataLoaderConfiguration, PreparedLoader, SkippingLoader, TailPolicy
from drivetrain.runtime import observer
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.precision import Float16Mixed
from drivetrain.strategies.precision.base import AgreeingGradScaler
from drivetrain.trackers import Tracker, TrackerGroup, find_tracker

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]

_STRATEGIES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
_KINDS: dict[type, type] = {
    engine.PreparedOptimizer: AcceleratedOptimizer,
    engine.PreparedScheduler: AcceleratedScheduler,
}
"""The engine's kinds of prepared objects, and the classes of this package that stand for them."""


class LooseParameters(nn.ParameterList):
    """Parameters that a prepared optimizer holds and no prepared model has. Checkpoints contain them as one model."""


class PreparedList:
    """Descriptor of a list that the run owns. Assigning to the attribute replaces the list's content."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else getattr(owner.prepared, self._name)

    def __set__(self, owner: Any, content: Sequence[Any]) -> None:
        getattr(owner.prepared, self._name)[:] = content


class Accelerator(ReadMembers):
    """`drivetrain.Accelerator` with the arguments and members that scripts for Accelerate use.

    Attributes:
        kwargs_handlers: The argument of the constructor.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kwargs_handlers: Sequence[Any] = kwargs.get("kwargs_handlers") or []
        self._log_with = kwargs.get("log_with") or []
        if kwargs.get("gradient_accumulation_plugin") is not None and kwargs.get("gradient_accumulation_steps") == 1:
            del kwargs["gradient_accumulation_steps"]
        _count_as_deepspeed(kwargs)
        asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if asked and not any(kwargs.get(name) for name in ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins")):
            kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin()
        if _places_otherwise(kwargs):
            # transformers' Trainer relies on Accelerate ignoring DDP's options in this case.
            unused = self.ddp_handler
            kwargs["kwargs_handlers"] = [each for each in self.kwargs_handlers if each is not unused]
        self._step = 0
        self._native_amp: bool | None = None
        self._unscaled: tuple[torch.amp.GradScaler | None] | None = None
        kwargs.setdefault("device", os.environ.get(DEVICE_VARIABLE))
        super().__init__(*args, **kwargs)
        _refuse_without_directory(self.log_with, self.logging_dir)
        record_accelerator(self)
        self.state: AcceleratorState = AcceleratorState(record=self.state.record)
        self.gradient_state: GradientState = GradientState(window=self.accumulation, active=self.active_loaders)

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), list(self._dataloaders)

    def __setstate__(self, loaders: Sequence[Any]) -> None:
        self._dataloaders = loaders

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool | None = None, **kwargs: Any) -> None:
        """Run `drivetrain.Accelerator.backward`, and accept DeepSpeed's argument `scale_wrt_gas`."""
        if scale_wrt_gas is False and self.gradient_accumulation_steps != 1:
            loss = loss * self.gradient_accumulation_steps
        with self._boundary():
            super().backward(loss, **kwargs)

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        """Mark a backward pass inside an accumulation window for DeepSpeed, if the script does not."""
        within = self.distributed_type.value == "DEEPSPEED" and not self.sync_gradients
        with ExitStack() as entered:
            for model in self.prepared.models if within else ():
                entered.enter_context(self.no_sync(model))
            yield

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Run `drivetrain.Accelerator.prepare` with Accelerate's data order and random seeds."""
        mine = [not _is_marked(each) for each in objects]
        places = None if device_placement is None else list(compress(device_placement, mine))
        models = [*self.prepared.models, *(each for each in objects if isinstance(each, nn.Module))]
        loose = [loose_parameters(each, models) if isinstance(each, Optimizer) else [] for each in objects]
        with self._shuffling(objects):
            prepared = super().prepare(*compress(objects, mine), device_placement=places)
        made = iter(prepared if sum(mine) > 1 else [prepared] if sum(mine) else [])
        results = tuple(next(made) if own else given for own, given in zip(mine, objects, strict=True))
        for result, place, left in zip(results, device_placement or [None] * len(results), loose, strict=True):
            self._mirrored(result, place)
            if left:
                result.loose = left
        return results[0] if len(results) == 1 else results

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Run `drivetrain.Accelerator.prepare_model`."""
        return self._mirrored(super().prepare_model(model, device_placement, evaluation_mode))

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Unwrap a model like `drivetrain.Accelerator`, and also remove torch wrappers that the script added."""
        found = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        return without_wrappers(found, keep_fp32_wrapper, keep_torch_compile)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Run `drivetrain.Accelerator.prepare_optimizer`."""
        loose = loose_parameters(optimizer, self.prepared.models)
        prepared = self._mirrored(super().prepare_optimizer(optimizer, device_placement))
        if loose:
            prepared.loose = loose
        return prepared

    def prepare_scheduler(self, scheduler: Any, *, steps_per_call: int | None = None) -> Any:
        """Run `drivetrain.Accelerator.prepare_scheduler`."""
        return self._mirrored(super().prepare_scheduler(scheduler, steps_per_call=steps_per_call))

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `drivetrain.Accelerator.prepare_data_loader` with Accelerate's data order and random seeds.

        Args:
            data_loader: The data loader to prepare.
            device_placement: True to move batches to the device. None takes the Accelerator's setting.
            *args: As there.
            **kwargs: As there.
        """
        if _is_marked(data_loader):
            return data_loader
        with self._shuffling([data_loader]):
            prepared = super().prepare_data_loader(data_loader, device_placement, *args, **kwargs)
        return self._mirrored(prepared, device_placement)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkipDataLoader:
        """Run `drivetrain.Accelerator.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def _prepare_deepspeed(self, *objects: Any) -> tuple[Any, ...]:
        return tuple(self.prepare(each) for each in objects) if len(objects) < 2 else self.prepare(*objects)

    _prepare_fsdp2 = _prepare_megatron_lm = _prepare_deepspeed

    def _mirrored(self, prepared: Any, device_placement: bool | None = None) -> Any:
        """Change a prepared object's class to the one with Accelerate's members. Return the same object."""
        kind = _KINDS.get(type(prepared))
        if kind is not None:
            prepared.__class__ = kind
            prepared.accelerator = self
        if type(prepared) is PreparedLoader:
            prepared = shown_as_prepared(prepared, self.preparation.options.dataloader_config.dispatch_batches)
            prepared.accelerator = self
            moves = self.device_placement if device_placement is None else device_placement
            prepared._device = self.device if moves else None
            show_even_batches([prepared])
        elif kind is AcceleratedScheduler:
            prepared._split_batches = self.split_batches
        elif isinstance(prepared, nn.Module):
            prepared._is_accelerate_prepared = True  # type: ignore[assignment]
            if self._native_amp is False:
                PrecisionForward.remove(self.strategy.unwrap(prepared))
            if self._unscaled is not None:  # the strategy may have created its own scaler
                self.scaler = self._unscaled[0]
        return prepared

    @contextmanager
    def _shuffling(self, objects: Sequence[Any]) -> Iterator[None]:
        config = self.preparation.options.dataloader_config
        given, samples, dispatch = config.data_seed, config.seed_samples, config.dispatch_batches
        config.seed_samples = bool(samples)
        if config.use_seedable_sampler and given is None:
            config.data_seed = torch.initial_seed()
        elif self.num_processes > 1 and not config.dispatch_batches:
            for loader in objects:
                give_generator(loader)
        loaders = [each for each in objects if isinstance(each, DataLoader)]
        if loaders and all(isinstance(each.dataset, IterableDataset) for each in loaders):
            config.dispatch_batches = dispatch is not False  # like None, except that processes are compared
        try:
            yield
        finally:
            config.data_seed, config.seed_samples, config.dispatch_batches = given, samples, dispatch

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Register a hook that runs before `save_state`. It receives unwrapped models."""

        def given_bare(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            own = [self.strategy.unwrap(each) for each in models if not isinstance(each, LooseParameters)]
            first_loose = len(weights) - (len(models) - len(own))
            loose, weights[first_loose:] = weights[first_loose:], []  # the hook may remove weights
            hook(own, weights, folder)
            weights += loose

        return super().register_save_state_pre_hook(given_bare)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Register a hook that runs before `load_state`. It receives unwrapped models."""

        def given_bare(models: list[nn.Module], folder: str) -> None:
            loose: list[nn.Module] = [each for each in models if isinstance(each, LooseParameters)]
            left = [self.strategy.unwrap(each) for each in models[: len(models) - len(loose)]]
            hook(left, folder)
            models[:] = [each for each in models if any(self.strategy.unwrap(each) is one for one in left)] + loose

        return super().register_load_state_pre_hook(given_bare)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Accumulate gradients like `drivetrain.Accelerator.accumulate`, and count the micro-batch in `step`."""
        with super().accumulate(*models):
            self._count_micro_batch()
            yield

    def _do_sync(self) -> None:
        self.accumulation.advance()
        self._count_micro_batch()

    def _count_micro_batch(self) -> None:
        state = self.gradient_state
        self._step = 0 if state.sync_with_dataloader and state.end_of_dataloader else self._step + 1

    @property
    def step(self) -> int:
        """Micro-batches since the last data loader ended. Assign it to move the end of the accumulation window."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        self.accumulation.count = value % self.gradient_accumulation_steps

    @property
    def native_amp(self) -> bool:
        """True if models run under torch's autocast. Assign False before `prepare` to turn autocast off."""
        return self.mixed_precision in ("fp16", "bf16") if self._native_amp is None else self._native_amp

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        self._native_amp = value

    def autocast(self, autocast_handler: engine.AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context manager of `drivetrain.Accelerator.autocast`, or an empty one if `native_amp` is False."""
        return nullcontext() if self._native_amp is False else super().autocast(autocast_handler)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler for fp16. Assign another scaler to replace it, or None to turn loss scaling off."""
        return super().scaler if self._unscaled is None else self._unscaled[0]

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        scales, precision = scaler is not None and scaler.is_enabled(), self.precision
        if not isinstance(precision, Float16Mixed):
            if scales:
                raise ConfigurationError(
                    f"accelerator.scaler was given a loss scaler, but mixed_precision={self.mixed_precision!r} scales "
                    'no loss. Make the Accelerator with mixed_precision="fp16", whose scaler can then be replaced.',
                )
        elif scales and isinstance(precision.scaler, AgreeingGradScaler) and not isinstance(scaler, AgreeingGradScaler):
            raise ConfigurationError(
                f"Under {self.distributed_type.value} the processes must agree on overflow, which the scaler that was "
                "assigned does not. Give its options instead: Accelerator(kwargs_handlers=[GradScalerKwargs(...)]).",
            )
        else:
            off: Any = torch.amp.GradScaler(self.kind.autocast_type, enabled=False)
            precision.scaler = off if scaler is None else scaler
        self._unscaled = None if scales else (scaler,)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Run `drivetrain.Accelerator.init_trackers`. TensorBoard's files are directly in the project's directory."""
        options = dict(init_kwargs or {})
        options["tensorboard"] = {"version": "", **options.get("tensorboard", {})}
        super().init_trackers(project_name, config, options)

    @property
    def trackers(self) -> list[Tracker]:
        """Trackers of the run. Assign a list to replace them."""
        return super().trackers

    @trackers.setter
    def trackers(self, trackers: Sequence[Tracker]) -> None:
        self.tracking.group = TrackerGroup(observer.observed(list(trackers)), self.is_main_process)

    @property
    def log_with(self) -> list[Any]:
        """Value of the argument `log_with`, as a list."""
        return list(self._log_with) if isinstance(self._log_with, list | tuple) else [self._log_with]

    _models, _optimizers = PreparedList("models"), PreparedList("optimizers")
    _schedulers, _dataloaders = PreparedList("schedulers"), PreparedList("loaders")
    _custom_objects = PreparedList("registered")

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Run `drivetrain.Accelerator.join_uneven_inputs`. Warns if the strategy makes it a no-op."""
        if self.use_distributed and not self.distributed_type.value.startswith("MULTI_"):
            warnings.warn(
                "Joining uneven inputs is only supported for multi-GPU training (DDP, on any device): "
                f"under {self.distributed_type.value} join_uneven_inputs has no effect.",
                UserWarning,
                stacklevel=2,
            )
            return nullcontext()
        return self._joined(joinables, even_batches)

    @contextmanager
    def _joined(self, joinables: Sequence[nn.Module], even_batches: bool | None) -> Iterator[None]:
        try:
            with super().join_uneven_inputs(joinables, even_batches):
                show_even_batches(self.prepared.loaders)
                yield
        finally:
            show_even_batches(self.prepared.loaders)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Run `drivetrain.Accelerator.register_for_checkpointing`. The error names all objects without a state."""
        unfit = [
            f"Item at index {index} ({type(each).__name__})"
            for index, each in enumerate(objects)
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))
        ]
        if unfit:
            raise ConfigurationError(
                f"{', '.join(unfit)} cannot be registered for checkpointing without state_dict() and load_state_dict()."
            )
        super().register_for_checkpointing(*objects)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> str:
        """Save like `drivetrain.Accelerator.save_state`. Rank 0 chooses the directory if ranks pass different ones."""
        with self._loose_parameters():
            return super().save_state(self._same_for_all(output_dir), *args, **kwargs)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load like `drivetrain.Accelerator.load_state`. Rank 0 chooses the directory if ranks pass different ones."""
        with self._loose_parameters():
            super().load_state(self._same_for_all(input_dir), *args, **kwargs)

    @contextmanager
    def _loose_parameters(self) -> Iterator[None]:
        """Add `LooseParameters` of each optimizer to the prepared models, in the `with` body."""
        models = self.prepared.models
        count = len(models)
        for optimizer in self.prepared.optimizers:
            alone = {id(each) for each in getattr(optimizer, "loose", ())}
            held = [each for each in loose_parameters(optimizer, models) if id(each) in alone]
            if held:
                models.append(LooseParameters(held))
        try:
            yield
        finally:
            del models[count:]

    def _same_for_all(self, directory: Any) -> Any:
        if directory is None or self.num_processes == 1:
            return directory
        return broadcast_object_list([os.fspath(directory)])[0]


def _is_marked(given: Any) -> bool:
    """Return True if the script marked its own data loader with `_is_accelerate_prepared`."""
    own = isinstance(given, DataLoader) and not isinstance(given, PreparedLoader | SkippingLoader)
    return own and getattr(given, "_is_accelerate_prepared", False)


def loose_parameters(optimizer: Any, models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of an optimizer that belong to none of the models."""
    known = {id(each) for model in models for each in model.parameters()}
    groups = getattr(optimizer, "param_groups", ())  # DeepSpeed's placeholders have none
    return [each for group in groups for each in group["params"] if id(each) not in known]


def give_generator(loader: Any) -> None:
    """Give a loader's random sampler its own generator, as Accelerate does with several processes.

    The seed is drawn from rank 0's random state, so that all ranks shuffle alike.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    if isinstance(loader, DataLoader) and getattr(sampler, "generator", loader) is None:
        seed = torch.empty((), dtype=torch.int64).random_()
        sampler.generator = torch.Generator().manual_seed(int(broadcast_object_list([int(seed)])[0]))


def show_even_batches(loaders: Sequence[PreparedLoader]) -> None:
    """Set `even_batches` on the loaders' batch samplers, where Accelerate's scripts read it."""
    for loader in loaders:
        sampler = getattr(loader.loader, "batch_sampler", None)
        if isinstance(sampler, BatchSampler):
            sampler.even_batches = loader.tail is TailPolicy.COMPLETE  # type: ignore[attr-defined]


def _refuse_without_directory(log_with: Sequence[Any], directory: str | None) -> None:
    """Raise if a tracker that writes files is requested by name without a logging directory."""
    names = [str(getattr(each, "value", each)) for each in log_with if not isinstance(each, Tracker)]
    for name in names if directory is None and "all" not in names else []:
        if getattr(find_tracker(name), "requires_logging_directory", name in ("aim", "tensorboard")):
            raise ConfigurationError(
                f"Logging with `{name}` requires a `logging_dir`, because it writes files. Give "
                "Accelerator(project_dir=...), or logging_dir in its project_config.",
                see="trackers.md",
            )


def _count_as_deepspeed(given: dict[str, Any]) -> None:
    """Take the number of accumulation steps from DeepSpeed's configuration if the script gives none."""
    plugin = given.get("deepspeed_plugin")
    ask = getattr(plugin, "get_value", None)
    in_plugin = None if ask is None else ask("gradient_accumulation_steps")
    decided = given.get("gradient_accumulation_plugin") or given.get("gradient_accumulation_steps") not in (None, 1)
    if isinstance(in_plugin, int) and not decided:
        given["gradient_accumulation_steps"] = in_plugin


def _places_otherwise(given: Mapping[str, Any]) -> bool:
    """Return True if the arguments or the launcher select a strategy other than DDP."""
    arguments = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")
    variables = [f"{owner}_USE_{name}" for owner in ("DRIVETRAIN", "ACCELERATE") for name in _STRATEGIES]
    asked = any(os.environ.get(name, "").lower() in ("1", "true") for name in variables)
    return asked or any(given.get(name) is not None for name in arguments)
