"""`AcceleratorState`: what `accelerator.state` shows, the process's state and what one engine was made with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drivetrain.accelerator.launched import Launched
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import DistributedType, PartialState
from drivetrain.strategies.capabilities import Configurations

_KEY = "engine"


@dataclass
class EngineRecord:
    """What an engine was made with, in Accelerate's names.

    Attributes:
        mixed_precision: Name of the precision; full precision is `"no"`.
        distributed_type: How the run is spread; as its processes are if None.
        plugins: The plugins that were given, by the name of their argument.
        is_fsdp2: Whether parameters are sharded by torch's `fully_shard`.
        configurations: The strategy's configurations, where it may hold several.
    """

    mixed_precision: str = "no"
    distributed_type: DistributedType | None = None
    plugins: dict[str, Any] = field(default_factory=dict)
    is_fsdp2: bool = False
    configurations: Configurations | None = None


class AcceleratorState(PartialState):
    """This process among its peers, and what its engine was made with: `accelerator.state`.

    Made by itself it shows the engine that was made last; each `Accelerator` has its own.

    Args:
        mixed_precision: What it must be; anything if None.
        cpu: As `PartialState` takes it.
        **options: As `PartialState` takes them, and plugins as `Accelerator` takes them, for a state that is made
            before any engine.

    Raises:
        ConfigurationError: There is an engine of another precision.
    """

    __slots__ = ("engine_record",)

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **options: Any) -> None:
        record: EngineRecord | None = options.pop("record", None)
        plugins = {name: value for name, value in options.items() if name.endswith(("plugin", "config"))}
        super().__init__(cpu, **{name: value for name, value in options.items() if name not in plugins})
        if record is None:
            record = self.registry().get(_KEY)
        if record is None:
            named = mixed_precision or Launched.here().settings.get("mixed_precision", "no")
            record = EngineRecord(named, plugins=plugins)
        elif mixed_precision is not None and mixed_precision != record.mixed_precision:
            raise ConfigurationError(
                f"The engine of this process computes in mixed_precision={record.mixed_precision!r}, so its state "
                f"cannot be one in {mixed_precision!r}. Give it to Accelerator(mixed_precision=...).",
                code="DT-070",
            )
        object.__setattr__(self, "engine_record", record)
        self.registry()[_KEY] = record

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Forget the engine that was made last, and with `reset_partial_state` the process too."""
        cls.registry().pop(_KEY, None)
        if reset_partial_state:
            super()._reset_state()

    @property
    def record(self) -> EngineRecord:
        """What the engine was made with."""
        try:
            found: EngineRecord = self.engine_record
        except AttributeError:  # out of a pickle
            found = self.registry().get(_KEY) or EngineRecord()
        return found

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is spread: by its strategy where that has a name in Accelerate, else as its processes are."""
        return self.record.distributed_type or super().distributed_type

    @property
    def mixed_precision(self) -> str:
        """Name of the precision; full precision is `"no"`."""
        return self.record.mixed_precision

    @property
    def deepspeed_plugins(self) -> Any:
        """The DeepSpeed plugins that were given, by name or one alone."""
        return self.record.plugins.get("deepspeed_plugins")

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed plugin in use."""
        return self.record.plugins.get("deepspeed_plugin")

    @property
    def fsdp_plugin(self) -> Any:
        """The FSDP plugin."""
        return self.record.plugins.get("fsdp_plugin")

    @property
    def megatron_lm_plugin(self) -> Any:
        """The Megatron plugin."""
        return self.record.plugins.get("megatron_lm_plugin")

    @property
    def torch_tp_plugin(self) -> Any:
        """The plugin for tensor parallelism."""
        return self.record.plugins.get("torch_tp_plugin")

    @property
    def dynamo_plugin(self) -> Any:
        """The plugin for compilation."""
        return self.record.plugins.get("dynamo_plugin")

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the grid of processes."""
        return self.record.plugins.get("parallelism_config")

    @property
    def device_mesh(self) -> Any:
        """The mesh of a grid of processes, if there is one."""
        return self.record.plugins.get("device_mesh")

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by torch's `fully_shard`."""
        return self.record.is_fsdp2

    def get_deepspeed_plugin(self, name: str) -> Any:
        """One of several DeepSpeed plugins.

        Raises:
            ConfigurationError: There is none of this name.
        """
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, dict) or name not in plugins:
            named = ", ".join(plugins) if isinstance(plugins, dict) else "none"
            raise ConfigurationError(
                f"There is no DeepSpeed plugin {name!r}; named are: {named}. Give this Accelerator all of them: "
                "Accelerator(deepspeed_plugins={name: plugin, ...}).",
                code="DT-001",
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Let one of several DeepSpeed plugins place what is prepared from now on.

        What has been prepared keeps the configuration that it was prepared with. `deepspeed_plugin` returns the
        selected one.

        Args:
            name: Its key in `Accelerator(deepspeed_plugins=...)`; nothing changes if None.

        Raises:
            ConfigurationError: There is none of this name.
        """
        if name is None:
            return
        self.record.plugins["deepspeed_plugin"] = self.get_deepspeed_plugin(name)
        if self.record.configurations is not None:
            self.record.configurations.select(name)

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"
