"""`Accelerator` with the members that only scripts written for Accelerate use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from drivetrain import accelerator as engine
from drivetrain.accelerator import GradientAccumulationPlugin
from drivetrain.accelerator.state_hooks import HookHandle, LoadHook, SaveHook
from drivetrain.compat.accelerate.state import AcceleratorState, record_accelerator
from drivetrain.compat.accelerate.utils.fsdp_plugin import FullyShardedDataParallelPlugin
from drivetrain.data import DataLoaderConfiguration, PreparedLoader, TailPolicy
from drivetrain.runtime.collectives import broadcast_object_list

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]

_STRATEGIES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


class PreparedList:
    """An attribute that is one of the run's lists, whose content an assignment replaces.

    Args:
        name: The name of the list in `Accelerator.prepared`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else getattr(owner.prepared, self._name)

    def __set__(self, owner: Any, content: Sequence[Any]) -> None:
        getattr(owner.prepared, self._name)[:] = content


class Accelerator(engine.Accelerator):
    """`drivetrain.Accelerator` as Accelerate's scripts make and read it.

    Args:
        *args: As there.
        **kwargs: As there.

    Attributes:
        kwargs_handlers: What was given under this name.
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
            # Accelerate ignores DDP's options then, which the Trainer of transformers counts on.
            unused = self.ddp_handler
            kwargs["kwargs_handlers"] = [each for each in self.kwargs_handlers if each is not unused]
        super().__init__(*args, **kwargs)
        record_accelerator(self)
        self.state: AcceleratorState = AcceleratorState(record=self.state.record)

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool | None = None, **kwargs: Any) -> None:
        """As `drivetrain.Accelerator.backward`, with an argument of DeepSpeed's engine.

        Args:
            loss: The mean loss of this micro-batch.
            scale_wrt_gas: False where the loss is this micro-batch's share of the step's mean already.
            **kwargs: As there.
        """
        if scale_wrt_gas is False and self.gradient_accumulation_steps != 1:
            loss = loss * self.gradient_accumulation_steps
        with self._boundary():
            super().backward(loss, **kwargs)

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        """Under DeepSpeed, let a backward within a window be one also where the script enters no context for it."""
        within = self.distributed_type.value == "DEEPSPEED" and not self.sync_gradients
        with ExitStack() as entered:
            for model in self.prepared.models if within else ():
                entered.enter_context(self.no_sync(model))
            yield

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """As `drivetrain.Accelerator.prepare`, with the order and randomness of data that Accelerate has.

        Args:
            *objects: As there.
            device_placement: As there.
        """
        with self._shuffling(objects):
            prepared = super().prepare(*objects, device_placement=device_placement)
        show_even_batches(self.prepared.loaders)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As `drivetrain.Accelerator.prepare_data_loader`, with the order and randomness of data that Accelerate has.

        Args:
            data_loader: As there.
            *args: As there.
            **kwargs: As there.
        """
        with self._shuffling([data_loader]):
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        show_even_batches(self.prepared.loaders)
        return prepared

    @contextmanager
    def _shuffling(self, objects: Sequence[Any]) -> Iterator[None]:
        config = self.preparation.options.dataloader_config
        given, samples = config.data_seed, config.seed_samples
        config.seed_samples = bool(samples)
        if config.use_seedable_sampler and given is None:
            config.data_seed = torch.initial_seed()
        elif self.num_processes > 1 and not config.dispatch_batches:
            for loader in objects:
                give_generator(loader)
        try:
            yield
        finally:
            config.data_seed, config.seed_samples = given, samples

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """As `drivetrain.Accelerator.register_save_state_pre_hook`; models are given as they were.

        Args:
            hook: As there.
        """
        return super().register_save_state_pre_hook(
            lambda models, weights, folder: hook([self.strategy.unwrap(each) for each in models], weights, folder)
        )

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """As `drivetrain.Accelerator.register_load_state_pre_hook`; models are given as they were.

        Args:
            hook: As there.
        """

        def given_bare(models: list[nn.Module], folder: str) -> None:
            left = [self.strategy.unwrap(each) for each in models]
            hook(left, folder)
            models[:] = [each for each in models if any(self.strategy.unwrap(each) is one for one in left)]

        return super().register_load_state_pre_hook(given_bare)

    @property
    def native_amp(self) -> bool:
        """Whether the precision is one that torch's autocast computes."""
        return self.mixed_precision in ("fp16", "bf16")

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
        return next((each for each in self.kwargs_handlers if isinstance(each, kind)), None)

    @property
    def log_with(self) -> list[Any]:
        """What was given under this name, as a list."""
        return list(self._log_with) if isinstance(self._log_with, list | tuple) else [self._log_with]

    _models, _optimizers = PreparedList("models"), PreparedList("optimizers")
    _schedulers, _dataloaders = PreparedList("schedulers"), PreparedList("loaders")
    _custom_objects = PreparedList("registered")

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """As `drivetrain.Accelerator.join_uneven_inputs`, with a warning where it has no effect.

        Args:
            joinables: The prepared models.
            even_batches: Overrides the instance's choice for loops that start in the context.
        """
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

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> str:
        """As `drivetrain.Accelerator.save_state`; where processes name different directories, in the first one's.

        Args:
            output_dir: As there.
            *args: As there.
            **kwargs: As there.
        """
        return super().save_state(self._same_for_all(output_dir), *args, **kwargs)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As `drivetrain.Accelerator.load_state`; where processes name different directories, from the first one's.

        Args:
            input_dir: As there.
            *args: As there.
            **kwargs: As there.
        """
        super().load_state(self._same_for_all(input_dir), *args, **kwargs)

    def _same_for_all(self, directory: Any) -> Any:
        if directory is None or self.num_processes == 1:
            return directory
        return broadcast_object_list([os.fspath(directory)])[0]

    def _do_sync(self) -> None:
        self.accumulation.advance()


def give_generator(loader: Any) -> None:
    """Give the random sampler of a loader a generator of its own, as Accelerate does on several processes.

    Its seed is the next number of this process's own random state, which the first process's decides for all.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    if isinstance(loader, DataLoader) and getattr(sampler, "generator", loader) is None:
        seed = torch.empty((), dtype=torch.int64).random_()
        sampler.generator = torch.Generator().manual_seed(int(broadcast_object_list([int(seed)])[0]))


def show_even_batches(loaders: Sequence[PreparedLoader]) -> None:
    """Let `loader.batch_sampler.even_batches` be read, which belongs to Accelerate's own kind of batch sampler."""
    for loader in loaders:
        sampler = getattr(loader.loader, "batch_sampler", None)
        if isinstance(sampler, BatchSampler):
            sampler.even_batches = loader.tail is TailPolicy.COMPLETE  # type: ignore[attr-defined]


def _count_as_deepspeed(given: dict[str, Any]) -> None:
    """Let a DeepSpeed configuration decide how many micro-batches a step holds, where the script does not."""
    plugin = given.get("deepspeed_plugin")
    ask = getattr(plugin, "get_value", None)
    in_plugin = None if ask is None else ask("gradient_accumulation_steps")
    decided = given.get("gradient_accumulation_plugin") or given.get("gradient_accumulation_steps") not in (None, 1)
    if isinstance(in_plugin, int) and not decided:
        given["gradient_accumulation_steps"] = in_plugin


def _places_otherwise(given: Mapping[str, Any]) -> bool:
    """Whether the arguments or the launcher ask for a strategy other than DDP."""
    arguments = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")
    variables = [f"{owner}_USE_{name}" for owner in ("DRIVETRAIN", "ACCELERATE") for name in _STRATEGIES]
    asked = any(os.environ.get(name, "").lower() in ("1", "true") for name in variables)
    return asked or any(given.get(name) is not None for name in arguments)
