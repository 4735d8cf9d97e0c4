"""FSDP's options with the methods that only Accelerate's plugin has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.accelerator import FullyShardedDataParallelPlugin as EngineFSDPPlugin


@dataclass
class FullyShardedDataParallelPlugin(EngineFSDPPlugin):
    """`drivetrain.FullyShardedDataParallelPlugin`, as scripts read and change it."""

    def __post_init__(self) -> None:
        names: Any = self.transformer_cls_names_to_wrap
        if isinstance(names, str):
            self.transformer_cls_names_to_wrap = [each.strip() for each in names.split(",") if each.strip()] or None
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.set_state_dict_type(self.state_dict_type)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set whether scripts that save by themselves get whole state dicts or shards."""
        given = getattr(state_dict_type, "name", state_dict_type)
        self.state_dict_type = str(given or "FULL_STATE_DICT").upper()

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Take over how modules are grouped from the environment, as `accelerate launch` gives it."""
        import os

        chosen = os.environ.get("FSDP_AUTO_WRAP_POLICY")
        if chosen and self.auto_wrap_policy is None:
            self.auto_wrap_policy = chosen.lower()
            if chosen == "SIZE_BASED_WRAP" and self.min_num_params is None:
                self.min_num_params = int(os.environ.get("FSDP_MIN_NUM_PARAMS", "0")) or None
                if self.min_num_params is None:
                    self.auto_wrap_policy = "no_wrap"

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the dtype in which parameters are gathered and gradients reduced."""
        if self.mixed_precision_policy is None or override:
            name = str(mixed_precision).removeprefix("torch.")
            names = {"bfloat16": "bf16", "float16": "fp16", "no": None, "float32": None}
            self.mixed_precision_policy = names.get(name, name)
