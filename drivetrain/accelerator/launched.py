"""What the launcher was asked for, where the script does not choose by itself: a strategy, its options, a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.accelerator.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Plugins,
)
from drivetrain.launch.settings.environment import settings_in_environment
from drivetrain.strategies import Strategy

# Names of settings without their prefix, and what the plugins call them.
_FIELDS = {
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "config_file": "hf_ds_config",
    "moe_layer_cls_names": "transformer_moe_cls_names",
}
_UNIT_SIZE = 100_000_000  # of SIZE_BASED_WRAP where none is given, as in Accelerate


@dataclass(frozen=True)
class Launched:
    """The settings that reached this process through its environment.

    Args:
        settings: Values by name of setting.
    """

    settings: Mapping[str, Any]

    @classmethod
    def here(cls) -> Launched:
        """What the environment of this process asks for.

        Raises:
            ConfigurationError: A variable's value cannot be.
        """
        return cls(settings_in_environment())

    @property
    def fsdp(self) -> FullyShardedDataParallelPlugin | None:
        """The options of FSDP, if it was asked for."""
        if not self.settings.get("use_fsdp"):
            return None
        options = self._options("fsdp_")
        if options.get("auto_wrap_policy") == "SIZE_BASED_WRAP":
            options.setdefault("min_num_params", _UNIT_SIZE)
        return FullyShardedDataParallelPlugin(**options)

    @property
    def deepspeed(self) -> DeepSpeedPlugin | None:
        """The options of DeepSpeed, if it was asked for."""
        if not self.settings.get("use_deepspeed"):
            return None
        known = {each.name for each in fields(DeepSpeedPlugin)} - {"gradient_accumulation_steps"}
        options = {name: value for name, value in self.settings.items() if name in known}
        options |= {name: value for name, value in self._options("deepspeed_").items() if name in known}
        return DeepSpeedPlugin(**options)

    @property
    def parallelism(self) -> ParallelismConfig | None:
        """The sizes of the grid, if one was asked for."""
        if not self.settings.get("use_parallelism_config"):
            return None
        sizes = {
            name: value
            for name, value in self._options("parallelism_config_").items()
            if name in {each.name for each in fields(ParallelismConfig)} and name.endswith("_size")
        }
        exchange = self.settings.get("parallelism_config_cp_comm_strategy")
        return ParallelismConfig(**sizes, cp_handler=exchange and SimpleNamespace(cp_comm_strategy=exchange))

    @property
    def megatron(self) -> MegatronLMPlugin | None:
        """The options of Megatron, if it was asked for."""
        if not self.settings.get("use_megatron_lm"):
            return None
        return MegatronLMPlugin(**self._options("megatron_lm_"))

    @property
    def fp8_config(self) -> dict[str, Any]:
        """The recipe for `"fp8"`, as keys of an `fp8_config`."""
        return {name: value for name, value in self.settings.items() if name.startswith("fp8_")}

    @property
    def plugins(self) -> Plugins:
        """The strategies that were asked for, as plugins."""
        fsdp = self.fsdp
        if fsdp is not None and "NO_SHARD" in (fsdp.sharding_strategy, fsdp.reshard_after_forward):
            fsdp = None  # the name of a strategy of FSDP that is DDP
        return Plugins(fsdp, self.deepspeed, None, self.parallelism, self.megatron)

    def complete(self, spec: str | Strategy, given: Plugins) -> Plugins:
        """The plugins of a script, and the launcher's where it chooses no strategy; what it leaves open is filled.

        Args:
            spec: The strategy that the script names; `"auto"` where it names none.
            given: The plugins that the script gives. A mapping is taken as it is.
        """
        launched = self.plugins
        if not given.by_name():
            return launched if spec == "auto" else given
        fsdp, parallelism = given.fsdp_plugin, given.parallelism_config
        if parallelism is not None and fsdp is None:
            fsdp = launched.fsdp_plugin
        elif fsdp is not None and parallelism is None:
            parallelism = launched.parallelism_config
        return replace(
            given,
            fsdp_plugin=_filled(fsdp, launched.fsdp_plugin),
            deepspeed_plugin=_filled(given.deepspeed_plugin, launched.deepspeed_plugin),
            parallelism_config=parallelism,
            megatron_lm_plugin=_filled(given.megatron_lm_plugin, launched.megatron_lm_plugin),
        )

    def asks_for(self, strategy: str | Strategy) -> bool:
        """Whether a strategy is the one that the launcher was asked for."""
        launched = self.plugins.strategy() if isinstance(strategy, Strategy) else None
        return launched is not None and launched.name == getattr(strategy, "name", None)

    def _options(self, prefix: str) -> dict[str, Any]:
        """The settings with a prefix, under the names of the plugins' fields."""
        short = {name.removeprefix(prefix): value for name, value in self.settings.items() if name.startswith(prefix)}
        return {_FIELDS.get(name, name): value for name, value in short.items()}


def _filled(plugin: Any, launched: Any) -> Any:
    """A plugin whose open fields are as the launcher was asked; a mapping is taken as it is."""
    if launched is None or plugin is None or isinstance(plugin, Mapping):
        return plugin
    left_open = [each.name for each in fields(plugin) if getattr(plugin, each.name) is None]
    return replace(plugin, **{name: getattr(launched, name) for name in left_open})
