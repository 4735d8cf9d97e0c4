"""fp8 through TransformerEngine."""

from __future__ import annotations

from torch import nn

from drivetrain.compat.accelerate.absent import absent_names

__getattr__ = absent_names(
    __name__,
    (
        'Ask for Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(...)]), which converts the model.',
        ["apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model"],
    ),
)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return True if a model contains Transformer Engine's layers."""
    return any(type(module).__module__.startswith("transformer_engine.") for module in model.modules())
