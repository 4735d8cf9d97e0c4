"""The plugins that an engine was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from drivetrain.accelerator.launched import Launched
from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.accelerator.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies import Strategy


@dataclass
class Plugins:
    """The plugins that an engine was given, each as an object or as the keys of its YAML."""

    fsdp_plugin: FullyShardedDataParallelPlugin | Mapping[str, Any] | None = None
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, Any] | None = None
    deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None
    parallelism_config: ParallelismConfig | None = None
    megatron_lm_plugin: MegatronLMPlugin | Mapping[str, Any] | None = None
    torch_tp_plugin: Any = None

    @classmethod
    def given(
        cls,
        fsdp: FullyShardedDataParallelPlugin | Mapping[str, Any] | None,
        deepspeed: DeepSpeedPlugin | Mapping[str, Any] | None,
        several: Mapping[str, DeepSpeedPlugin] | None,
        parallelism: ParallelismConfig | Mapping[str, Any] | None,
        megatron: MegatronLMPlugin | Mapping[str, Any] | None,
        tensor: Any = None,
    ) -> Plugins:
        """Take the arguments of an `Accelerator`.

        Raises:
            ConfigurationError: Two of them are of one kind.
        """
        if isinstance(deepspeed, Mapping) and any(map(is_dataclass, deepspeed.values())):
            several, deepspeed = deepspeed, None
        if several and deepspeed is not None:
            raise ConfigurationError("deepspeed_plugin and deepspeed_plugins are given both; give one.", code="DT-004")
        if several:
            deepspeed = next(iter(several.values()))
        if isinstance(parallelism, Mapping):
            parallelism = ParallelismConfig(**parallelism)
        if tensor is not None:
            if parallelism is not None:
                raise ConfigurationError(
                    "torch_tp_plugin and parallelism_config are given both; give one.", code="DT-004"
                )
            parallelism = ParallelismConfig(tp_size=tensor.tp_size)
        return cls(fsdp, deepspeed, several, parallelism, megatron, tensor)

    def by_name(self) -> dict[str, Any]:
        """Those that were given, by the names of their arguments."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value is not None}

    def strategy(self, launched: Launched) -> Strategy | None:
        """The strategy that they ask for, if any was given.

        Args:
            launched: What the launcher was asked for, for what they leave open.

        Raises:
            ConfigurationError: Two of them contradict each other.
        """
        return launched.strategy_with(
            self.fsdp_plugin, self.deepspeed_plugin, self.parallelism_config, self.megatron_lm_plugin
        )

    def each_deepspeed(self, launched: Launched) -> dict[str, Strategy]:
        """The strategies that several DeepSpeed plugins ask for, by their names.

        Args:
            launched: What the launcher was asked for, for what they leave open.

        Raises:
            ConfigurationError: One of them is no such plugin.
        """
        found = {}
        for name, plugin in (self.deepspeed_plugins or {}).items():
            strategy = launched.strategy_with(None, plugin, None, None)
            if strategy is None:
                raise ConfigurationError(f"deepspeed_plugins[{name!r}] is None; give a DeepSpeedPlugin.", code="DT-003")
            found[name] = strategy
        return found
