"""fp8 through torchao."""

from __future__ import annotations

from torch import nn

from drivetrain.compat.accelerate.absent import absent_names

__getattr__ = absent_names(
    __name__,
    (
        'Ask for Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(...)]), which converts the model.',
        ["convert_model_to_fp8_ao", "filter_linear_layers"],
    ),
)


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layers, or `(None, None)`."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return True if the layer named `fqn` is neither the first nor the last linear layer."""
    return fqn not in find_first_last_linear_layers(module)


def has_ao_layers(model: nn.Module) -> bool:
    """Return True if a model contains torchao's `Float8Linear` layers."""
    return any(type(module).__name__ == "Float8Linear" for module in model.modules())
