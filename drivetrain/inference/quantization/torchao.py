"""8 and 4 bits, and 8-bit floats, by torchao."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.inference.quantization.base import Quantizer, linear_like
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, PackageMissingError, nearest

# torchao takes names apart at their last dot.
_PREFIX = "layer."
_NAME = f"{_PREFIX}weight"

# name -> (torchao's configuration, its arguments)
_SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8wo": ("Int8WeightOnlyConfig", {}),
    "int8dq": ("Int8DynamicActivationInt8WeightConfig", {}),
    "int4wo": ("Int4WeightOnlyConfig", {"group_size": 128}),
    "float8wo": ("Float8WeightOnlyConfig", {}),
    "float8dq": ("Float8DynamicActivationFloat8WeightConfig", {}),
}


@dataclass(eq=True, repr=False)
class TorchAO(Quantizer):
    """Linear layers whose weights torchao stores in 8 or 4 bits.

    Args:
        scheme: `"int8wo"` (8 bits, computed in floats), `"int8dq"` (8 bits, inputs too, as they come), `"int4wo"`,
            `"float8wo"` or `"float8dq"`.
        group_size: Weights that share a scale, in 4 bits.
    """

    name = "torchao"

    scheme: str = "int8wo"
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.scheme == "nf4":
            raise ConfigurationError(
                "torchao has no 'nf4' any more. Give BitsAndBytes(4, quant_type='nf4'), or 'nf4' for short."
            )
        if self.scheme not in _SCHEMES:
            raise ConfigurationError(
                f"TorchAO({self.scheme!r}): give one of {', '.join(_SCHEMES)}.{nearest(self.scheme, _SCHEMES)}"
            )
        if self.group_size is not None and self.scheme != "int4wo":
            raise ConfigurationError(f"group_size is for 'int4wo'; {self.scheme!r} has a scale for each row.")

    def check(self) -> None:
        if find_spec("torchao") is None:
            raise PackageMissingError(
                f'Weights in {self.scheme!r} need torchao, which is not installed: pip install "drivetrain[fp8]".'
            )
        try:
            self.quantize(nn.Linear(128, 8), torch.zeros(8, 128), torch.device("cpu"))
        except (AssertionError, ImportError) as error:
            if self.scheme == "float8dq" and torch.accelerator.is_available():
                return  # it asks for the device of the weights
            raise ConfigurationError(
                f"torchao cannot store weights in {self.scheme!r} on this machine: {error} On any there are 'int8wo', "
                "'int8dq' and 'float8wo', and 'nf4' of bitsandbytes."
            ) from error

    def quantize(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        import torchao.quantization as ao

        kind, options = _SCHEMES[self.scheme]
        if self.group_size is not None:
            options = {**options, "group_size": self.group_size}
        made = linear_like(layer, nn.Linear)
        bias, made.bias = made.bias, None
        made.weight = nn.Parameter(weight.to(device), requires_grad=False)
        ao.quantize_(made, getattr(ao, kind)(**options))
        made.weight.requires_grad_(False)
        made.bias = bias
        return made  # type: ignore[no-any-return]

    def made(self, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return isinstance(module, nn.Linear) and type(weight).__module__.startswith("torchao.")

    def saved(self, layer: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        flatten = _of_files("flatten_tensor_state_dict")
        try:
            tensors, texts = flatten({_NAME: layer.weight})
        except ValueError as error:
            raise ConfigurationError(
                f"torchao {version('torchao')} cannot write weights in {self.scheme!r} to files ({error}). Install "
                "torchao>=0.18, which needs a newer torch than 2.9."
            ) from error
        return {name.removeprefix(_PREFIX): value for name, value in tensors.items()}, texts

    def opened(
        self, layer: nn.Linear, tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device
    ) -> nn.Module:
        unflatten = _of_files("unflatten_tensor_state_dict")
        made_of = unflatten({f"{_PREFIX}{name}": value.to(device) for name, value in tensors.items()}, dict(texts))
        found, left = made_of if isinstance(made_of, tuple) else (made_of, {})  # an older one returns no rest
        if left or _NAME not in found:
            raise CheckpointError(f"torchao made no weight of {', '.join(sorted(tensors))}.")
        made = linear_like(layer, nn.Linear)
        made.weight = nn.Parameter(found[_NAME], requires_grad=False)
        return made  # type: ignore[no-any-return]

    def as_dict(self) -> dict[str, Any]:
        return {"scheme": self.scheme} | ({} if self.group_size is None else {"group_size": self.group_size})


def _of_files(name: str) -> Callable[..., Any]:
    """One of torchao's functions between its tensors and plain ones, for files of these."""
    import torchao.prototype.safetensors.safetensors_support as support

    found: Callable[..., Any] = getattr(support, name)
    return found
