"""Accelerate's three shared states, as views of this process and of the Accelerator that was made last."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.compat.accelerate.utils.dataclasses import DistributedType, GradientAccumulationPlugin
from drivetrain.runtime import state as runtime
from drivetrain.runtime.collective_checks import CallComparison
from drivetrain.runtime.environment import LAUNCHED_VARIABLE
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.process_group import DEFAULT_TIMEOUT, group_timeout

if TYPE_CHECKING:
    from drivetrain.compat.accelerate.accelerator import Accelerator

_LATEST = "compat.accelerate"
_OVERRIDDEN = "compat.accelerate.distributed_type"

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized"]


def latest_accelerator() -> Accelerator | None:
    """The Accelerator that was made last in this process."""
    return runtime.PartialState.registry().get(_LATEST)


def record_accelerator(accelerator: Accelerator) -> None:
    """Let the shared states show this Accelerator."""
    runtime.PartialState.registry()[_LATEST] = accelerator
    runtime.PartialState.registry().pop(_OVERRIDDEN, None)


def is_initialized() -> bool:
    """Whether an Accelerator was made, or the state of one asked for."""
    return latest_accelerator() is not None


class PartialState(runtime.PartialState):
    """`drivetrain.PartialState` with the members that only Accelerate's has.

    Args:
        cpu: Run on the CPU even where there is an accelerator.
        **kwargs: As for `drivetrain.PartialState`; what concerns other back ends of Accelerate is ignored.
    """

    _shared_state: ClassVar[dict[str, Any]] = runtime.PartialState.registry()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        known = {name: kwargs[name] for name in ("device", "backend", "timeout") if kwargs.get(name) is not None}
        super().__init__(cpu, **known)

    @property
    def distributed_type(self) -> Any:
        """How the processes are spread; what a script has set, if it has."""
        chosen = self.registry().get(_OVERRIDDEN)
        if chosen is not None:
            return chosen
        accelerator = latest_accelerator()
        plugins = {} if accelerator is None else accelerator.plugins
        names = {"deepspeed": "DEEPSPEED", "fsdp": "FSDP", "megatron": "MEGATRON_LM"}
        found = next((names[name] for name in names if plugins.get(name) is not None), super().distributed_type.name)
        return DistributedType.__members__.get(found, DistributedType.NO)

    @distributed_type.setter
    def distributed_type(self, value: Any) -> None:
        self.registry()[_OVERRIDDEN] = value

    @property
    def debug(self) -> bool:  # type: ignore[override]
        """Whether the processes compare their calls before each collective; may be switched on at any time."""
        return bool(self.__dict__.get("debug", False))

    @debug.setter
    def debug(self, value: bool) -> None:
        self.__dict__["debug"] = value
        store = self.store
        if value and store is not None and self.call_comparison is None:
            limit = group_timeout() or DEFAULT_TIMEOUT
            self.call_comparison = CallComparison(store, self.process_index, self.num_processes, limit)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @property
    def fork_launched(self) -> bool:
        """Whether a launcher started this process."""
        return LAUNCHED_VARIABLE in os.environ

    def set_device(self) -> None:
        """Do nothing: the device was chosen when the state was found."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"`{type(self).__name__}` object has no attribute `{name}`. "
            f"This happens if `{type(self).__name__}._reset_state()` was called and an `Accelerator` or `PartialState` "
            "was not made again."
        )


class AcceleratorState(PartialState):
    """What an Accelerator was made with: a view of the one that was made last in this process.

    Args:
        mixed_precision: The precision that is expected.
        cpu: Run on the CPU even where there is an accelerator.
        **kwargs: As for `PartialState`; plugins are the Accelerator's.

    Raises:
        ConfigurationError: The Accelerator has another precision.
    """

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__(cpu, **kwargs)
        if mixed_precision is not None and mixed_precision != self.mixed_precision:
            raise ConfigurationError(
                f"AcceleratorState(mixed_precision={mixed_precision!r}): the Accelerator of this process has "
                f"{self.mixed_precision!r}. Give the precision to the Accelerator."
            )

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:  # type: ignore[override]
        runtime.PartialState.registry().pop(_LATEST, None)
        runtime.PartialState.registry().pop(_OVERRIDDEN, None)
        PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """Name of the Accelerator's precision."""
        accelerator = latest_accelerator()
        return "no" if accelerator is None else accelerator.mixed_precision

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed options of the Accelerator; None without."""
        return self._option("deepspeed")

    @property
    def deepspeed_plugins(self) -> Any:
        """The same by name."""
        accelerator = latest_accelerator()
        return None if accelerator is None else accelerator.deepspeed_plugins

    @property
    def fsdp_plugin(self) -> Any:
        """The FSDP options of the Accelerator; None without."""
        return self._option("fsdp")

    @property
    def megatron_lm_plugin(self) -> Any:
        """The Megatron options of the Accelerator; None without."""
        return self._option("megatron")

    @property
    def dynamo_plugin(self) -> Any:
        """The options of `torch.compile`."""
        return self._option("dynamo")

    @property
    def torch_tp_plugin(self) -> Any:
        """The options of tensor parallelism; None without."""
        return self._option("tensor_parallel")

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the grid of processes; None without."""
        return self._option("parallelism")

    @property
    def use_ipex(self) -> bool:
        """False: Accelerate has dropped it too."""
        return False

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded one by one, as torch's `fully_shard` does."""
        return self.fsdp_plugin is not None

    def _option(self, name: str) -> Any:
        accelerator = latest_accelerator()
        return None if accelerator is None else accelerator.plugins.get(name)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed options of this name."""
        return (self.deepspeed_plugins or {})[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Let these DeepSpeed options be the ones in use."""
        accelerator = latest_accelerator()
        if accelerator is not None and name is not None:
            accelerator.plugins["deepspeed"] = self.get_deepspeed_plugin(name)


class GradientState:
    """The accumulation window and the loaders in use: a view of an Accelerator's.

    Args:
        gradient_accumulation_plugin: Accepted; the Accelerator's own counts.
        accelerator: Whose; that which was made last if None.
    """

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._of = accelerator

    @property
    def _accelerator(self) -> Accelerator:
        accelerator = self._of or latest_accelerator()
        if accelerator is None:
            raise ConfigurationError("GradientState shows an Accelerator, but none was made in this process.")
        return accelerator

    @property
    def initialized(self) -> bool:
        """Whether there is an Accelerator to show."""
        return self._of is not None or is_initialized()

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends a window."""
        return self._accelerator.accumulation.sync_gradients if self.initialized else True

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accelerator.accumulation.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._accelerator.gradient_accumulation_steps if self.initialized else 1

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """What differs from the defaults of accumulation."""
        plugin, default = self._accelerator.accumulation.plugin, GradientAccumulationPlugin()
        return {name: value for name, value in vars(plugin).items() if value != getattr(default, name)}

    @property
    def adjust_scheduler(self) -> bool:
        """Accepted; a prepared scheduler steps where its optimizer does."""
        return self._accelerator.accumulation.plugin.adjust_scheduler if self.initialized else True

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader always ends a window."""
        return self._accelerator.accumulation.plugin.sync_with_dataloader if self.initialized else True

    @property
    def active_dataloader(self) -> Any:
        """The loader that is being iterated; the innermost of several."""
        return self._accelerator.active_loaders.innermost if self.initialized else None

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated."""
        active = self.active_dataloader
        return [None] if active is None else [None, active]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in hand is the last one."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real rows of all processes in the last batch; -1 elsewhere."""
        active = self.active_dataloader
        return -1 if active is None else active.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: XLA's strategies reduce gradients by themselves."""
        return False

    @staticmethod
    def _reset_state() -> None:
        accelerator = latest_accelerator()
        if accelerator is not None:
            accelerator.accumulation.reset()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
        )
