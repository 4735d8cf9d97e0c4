"""DeepSpeed's options with the members of Accelerate's `DeepSpeedPlugin`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.accelerator import DeepSpeedPlugin as EngineDeepSpeedPlugin
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies import Strategy


@dataclass
class DeepSpeedPlugin(EngineDeepSpeedPlugin):
    """`drivetrain.DeepSpeedPlugin` with the members that scripts for Accelerate read and assign.

    Attributes:
        enable_msamp: Accepted without effect. Select MS-AMP with fp8 precision options.
        msamp_opt_level: Accepted without effect, like `enable_msamp`.
    """

    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        from drivetrain.compat.accelerate.utils.deepspeed import HfDeepSpeedConfig

        if self.hf_ds_config is None:
            self.hf_ds_config = HfDeepSpeedConfig(_configuration_of(self))
        elif not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        if self.zero_stage is None:
            self.zero_stage = int(self.hf_ds_config.get_value("zero_optimization.stage", 0))
        self._selected = True

    def strategy(self) -> Strategy:
        """Return the DeepSpeed strategy with these options.

        The configured accumulation steps may differ from the loop's. A loop that counts micro-batches itself, such as
        transformers' Trainer, passes 1.
        """
        from drivetrain.compat.accelerate.utils.deepspeed_strategy import CountedByTheLoop

        return CountedByTheLoop(**self.arguments())

    @property
    def selected(self) -> bool:
        """True if this is the plugin in use."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the plugin in use."""
        self._selected = True

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the configuration value at a path such as `"zero_optimization.stage"`, or `default`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if the configuration value at a path is `"auto"`."""
        return bool(self.get_value(ds_key_long) == "auto")

    def is_zero3_init_enabled(self) -> bool:
        """Return True if ZeRO 3 shards modules during their construction."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Turn the sharding of modules during construction on or off for the `with` body."""
        before, self.zero3_init_flag = self.zero3_init_flag, enable
        try:
            yield
        finally:
            self.zero3_init_flag = before

    def deepspeed_config_process(
        self, prefix: str = "", mismatches: Any = None, config: Any = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace the `"auto"` values of the configuration."""
        part = self.deepspeed_config if config is None else config
        for key, value in list(part.items()):
            path = f"{prefix}{key}"
            if isinstance(value, Mapping):
                self.deepspeed_config_process(f"{path}.", mismatches, value, must_match, **kwargs)
            elif value == "auto" and path in kwargs:
                part[key] = kwargs[path]

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace one configuration value if it is `"auto"`."""
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        found = None if node is None else node.get(key)
        if found == "auto" and ds_key_long not in kwargs:
            raise ConfigurationError(
                f"The DeepSpeed configuration has {ds_key_long}='auto', and no value was given for it. Give one to "
                "fill_match, or write it into the configuration.",
            )
        if found == "auto":
            node[key] = kwargs[ds_key_long]
        elif must_match and mismatches is not None and found is not None and found != kwargs.get(ds_key_long, found):
            mismatches.append(f"- ds {ds_key_long}={found} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable the configuration's section `fp16` or `bf16`."""
        if mixed_precision in ("fp16", "bf16"):
            self.deepspeed_config.setdefault(mixed_precision, {"enabled": True})

    def set_deepspeed_weakref(self) -> None:
        """Do nothing: the strategy configures what transformers shards while it is made."""

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Do nothing: the strategy marks these modules when it prepares the model."""


def _configuration_of(plugin: EngineDeepSpeedPlugin) -> dict[str, Any]:
    """Return a configuration from the plugin's arguments. The strategy fills in the rest."""
    zero: dict[str, Any] = {"stage": 2 if plugin.zero_stage is None else plugin.zero_stage}
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(plugin, f"{name}_device")
        if device not in (None, "none"):
            zero[name] = {"device": device}
            path = getattr(plugin, f"{name}_nvme_path")
            if device == "nvme" and path is not None:
                zero[name]["nvme_path"] = path
    if plugin.zero3_save_16bit_model:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    configuration: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": plugin.gradient_accumulation_steps or "auto",
        "zero_optimization": zero,
        "steps_per_print": float("inf"),
        "zero_allow_untested_optimizer": True,
    }
    if plugin.gradient_clipping is not None:
        configuration["gradient_clipping"] = plugin.gradient_clipping
    return configuration
