"""Quantised loading through bitsandbytes."""

from __future__ import annotations

from torch import nn

from drivetrain.compat.accelerate.absent import INTERNAL, absent_names
from drivetrain.inference import load_and_quantize_model as load_and_quantize_model

__getattr__ = absent_names(
    __name__,
    (
        INTERNAL,
        [
            "get_keys_to_not_convert",
            "get_quantized_model_device_map",
            "quantize_and_offload_8bit",
            "replace_with_bnb_layers",
        ],
    ),
)


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return True if a model contains bitsandbytes' `Linear4bit` layers."""
    return any(type(module).__name__ == "Linear4bit" for module in model.modules())
