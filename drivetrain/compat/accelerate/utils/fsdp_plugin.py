"""FSDP's options with the methods of Accelerate's plugin."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.accelerator import FullyShardedDataParallelPlugin as EngineFSDPPlugin
from drivetrain.compat.accelerate.utils.environment import str_to_bool

_WORDS = {
    "backward_prefetch": "BACKWARD_PREFETCH",
    "state_dict_type": "STATE_DICT_TYPE",
    "auto_wrap_policy": "AUTO_WRAP_POLICY",
    "transformer_cls_names_to_wrap": "TRANSFORMER_CLS_TO_WRAP",
    "ignored_modules": "IGNORED_MODULES",
}
_NUMBERS = {"fsdp_version": "VERSION", "min_num_params": "MIN_NUM_PARAMS"}
_FLAGS = {
    "cpu_offload": "OFFLOAD_PARAMS",
    "use_orig_params": "USE_ORIG_PARAMS",
    "sync_module_states": "SYNC_MODULE_STATES",
    "forward_prefetch": "FORWARD_PREFETCH",
    "activation_checkpointing": "ACTIVATION_CHECKPOINTING",
    "cpu_ram_efficient_loading": "CPU_RAM_EFFICIENT_LOADING",
}
"""By option: the variable that gives it, without `FSDP_`."""


@dataclass
class FullyShardedDataParallelPlugin(EngineFSDPPlugin):
    """`drivetrain.FullyShardedDataParallelPlugin` whose defaults come from environment variables."""

    def __post_init__(self) -> None:
        self._fill(_WORDS, str)
        self._fill(_NUMBERS, int)
        self._fill(_FLAGS, lambda value: bool(str_to_bool(value)))
        if self.sharding_strategy is None and self.reshard_after_forward is None:
            if self.fsdp_version == 2:
                self._fill({"reshard_after_forward": "RESHARD_AFTER_FORWARD"}, lambda value: bool(str_to_bool(value)))
            else:
                self._fill({"sharding_strategy": "SHARDING_STRATEGY"}, str)
        names: Any = self.transformer_cls_names_to_wrap
        if isinstance(names, str):
            self.transformer_cls_names_to_wrap = [each.strip() for each in names.split(",") if each.strip()] or None
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.set_state_dict_type(self.state_dict_type)

    def _fill(self, variables: Mapping[str, str], read: Callable[[str], Any]) -> None:
        for name, variable in variables.items():
            value = os.environ.get(f"FSDP_{variable}")
            if value and getattr(self, name) is None:
                setattr(self, name, read(value))

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose full or sharded state dicts for scripts that save by themselves."""
        given = getattr(state_dict_type, "name", state_dict_type)
        self.state_dict_type = str(given or "FULL_STATE_DICT").upper()

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Set the wrapping policy from the environment variables of `accelerate launch`."""
        chosen = os.environ.get("FSDP_AUTO_WRAP_POLICY")
        if chosen and self.auto_wrap_policy is None:
            self.auto_wrap_policy = chosen.lower()
            if chosen == "SIZE_BASED_WRAP" and self.min_num_params is None:
                self.min_num_params = int(os.environ.get("FSDP_MIN_NUM_PARAMS", "0")) or None
                if self.min_num_params is None:
                    self.auto_wrap_policy = "no_wrap"

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the dtype in which parameters are gathered and gradients are reduced."""
        if self.mixed_precision_policy is None or override:
            name = str(mixed_precision).removeprefix("torch.")
            names = {"bfloat16": "bf16", "float16": "fp16", "no": None, "float32": None}
            self.mixed_precision_policy = names.get(name, name)
