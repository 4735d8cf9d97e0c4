"""What the launcher was asked for, where the script does not choose by itself: a strategy, a recipe, compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from drivetrain.accelerator.compilation import Compilation
from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.accelerator.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    strategy_of_plugins,
)
from drivetrain.launch.settings.environment import settings_in_environment
from drivetrain.strategies import Strategy

Sharding = FullyShardedDataParallelPlugin | Mapping[str, Any] | None

# Names of settings without their prefix, and what the plugins call them.
_FIELDS = {
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "config_file": "hf_ds_config",
    "moe_layer_cls_names": "transformer_moe_cls_names",
}
_CP_ATTENTION = {"allgather": "gather", "alltoall": "ring"}
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
        return ParallelismConfig(**sizes)

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
    def compilation(self) -> Compilation | None:
        """How prepared models are compiled, if they shall be."""
        options = self._options("dynamo_")
        backend = options.get("backend", "no")
        if backend == "no":
            return None
        return Compilation(
            backend,
            options.get("mode"),
            bool(options.get("use_fullgraph")),
            options.get("use_dynamic"),
            bool(options.get("use_regional_compilation")),
        )

    @property
    def grid_options(self) -> dict[str, Any]:
        """Further arguments of `Parallel`."""
        given = self.settings.get("parallelism_config_cp_comm_strategy")
        return {} if given is None else {"cp_attention": _CP_ATTENTION[given]}

    def strategy(self) -> Strategy | None:
        """The strategy that was asked for; None leaves it open."""
        if self._shards_nothing(self.fsdp) and self.parallelism is None:
            return None
        grid = self.parallelism
        return strategy_of_plugins(
            self.fsdp, self.deepspeed, grid, self.megatron, self.grid_options if grid is not None else None
        )

    def strategy_with(
        self,
        fsdp: Sharding,
        deepspeed: DeepSpeedPlugin | Mapping[str, Any] | None,
        parallelism: ParallelismConfig | None,
        megatron: MegatronLMPlugin | Mapping[str, Any] | None,
    ) -> Strategy | None:
        """The strategy of the plugins that a script gives; what they leave open is as the launcher was asked.

        Returns:
            The strategy, or None where no plugin is given.
        """
        if parallelism is not None and fsdp is None:
            fsdp = self.fsdp
        elif fsdp is not None and parallelism is None:
            parallelism = self.parallelism
        return strategy_of_plugins(
            _filled(fsdp, self.fsdp),
            _filled(deepspeed, self.deepspeed),
            parallelism,
            _filled(megatron, self.megatron),
        )

    def _options(self, prefix: str) -> dict[str, Any]:
        """The settings with a prefix, under the names of the plugins' fields."""
        short = {name.removeprefix(prefix): value for name, value in self.settings.items() if name.startswith(prefix)}
        return {_FIELDS.get(name, name): value for name, value in short.items()}

    @staticmethod
    def _shards_nothing(plugin: FullyShardedDataParallelPlugin | None) -> bool:
        """Whether FSDP was asked for by the name of the strategy that is DDP."""
        return plugin is not None and "NO_SHARD" in (plugin.sharding_strategy, plugin.reshard_after_forward)


def _filled(plugin: Any, launched: Any) -> Any:
    """A plugin whose open fields are as the launcher was asked; a mapping is taken as it is."""
    if launched is None or plugin is None or isinstance(plugin, Mapping):
        return plugin
    open_fields = {each.name for each in fields(plugin) if getattr(plugin, each.name) is None}
    # A subclass may have fields that no launcher sets.
    asked = {each.name: getattr(launched, each.name) for each in fields(launched) if each.name in open_fields}
    return replace(plugin, **asked)
