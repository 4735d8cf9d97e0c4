"""Quantization to 8 and 4 bits and to 8-bit floats with torchao."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.inference.quantization.base import Quantizer, contexts_of, linear_like, pieces_of, plain_parts, rebuilt
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, PackageMissingError, nearest

# torchao splits names at their last dot, so a name must contain one.
_PREFIX = "layer."
_NAME = f"{_PREFIX}weight"

# Schemes with one scale per row. Some older torchao classes also store the full shape. Quantizing two different numbers
# of rows reveals this.
_BY_ROWS = ("int8wo", "int8dq", "float8wo")
_PROBED = (2, 3)

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
    """Quantizer for linear layers with torchao's weight formats, such as 8-bit integers.

    Args:
        scheme: `"int8wo"` (8-bit weights), `"int8dq"` (8-bit weights and dynamically quantized inputs), `"int4wo"`,
            `"float8wo"` or `"float8dq"`.
        group_size: Number of weights that share a scale in `"int4wo"`. None means 128.
    """

    name = "torchao"

    scheme: str = "int8wo"
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.scheme == "nf4":
            raise ConfigurationError(
                "torchao no longer supports 'nf4'. Use quantizer='nf4' or BitsAndBytes(4, quant_type='nf4') instead.",
            )
        if self.scheme not in _SCHEMES:
            raise ConfigurationError(
                f"scheme is {self.scheme!r}, but must be one of {', '.join(_SCHEMES)}.{nearest(self.scheme, _SCHEMES)}",
            )
        if self.group_size is not None and self.scheme != "int4wo":
            raise ConfigurationError(f"group_size needs 'int4wo', because {self.scheme!r} has one scale per row.")

    def check(self) -> None:
        if find_spec("torchao") is None:
            raise PackageMissingError(
                f'Quantization to {self.scheme!r} needs torchao, which is not installed: pip install "drivetrain[fp8]".'
            )
        try:
            # Kernels and optional packages are missing only at the first use, so quantize a small layer.
            self.quantize(nn.Linear(128, 8), torch.zeros(8, 128), torch.device("cpu"))
        except (AssertionError, ImportError) as error:
            if self.scheme == "float8dq" and torch.accelerator.is_available():
                return  # the failed check ran on the CPU, but the scheme supports accelerators only
            raise ConfigurationError(
                f"torchao does not support {self.scheme!r} on this machine: {error} Use 'int8wo', 'int8dq', "
                "'float8wo' or bitsandbytes' 'nf4', which all machines support.",
            ) from error

    def quantize(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        made = linear_like(layer, nn.Linear)
        by_rows = self.scheme in _BY_ROWS and len(weight) >= max(_PROBED)
        probes = (self._stored(weight[:rows].to(device, layer.weight.dtype)) for rows in _PROBED)
        if by_rows and _has_independent_rows(*probes):
            found = self._quantize_by_rows(layer, weight, device)
        else:
            found = self._stored(weight.to(device, layer.weight.dtype))
        made.weight = nn.Parameter(found, requires_grad=False)
        return made  # type: ignore[no-any-return]

    def _quantize_by_rows(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> Tensor:
        whole: dict[str, Tensor] = {}
        like: Any = None
        for rows, piece in pieces_of(layer, weight, device):
            like = self._stored(piece)
            for name, part in plain_parts(like):
                if name not in whole:
                    whole[name] = torch.empty(len(weight), *part.shape[1:], dtype=part.dtype, device=device)
                whole[name][rows] = part
        return rebuilt(like, whole, weight.shape)

    def _stored(self, weight: Tensor) -> Tensor:
        import torchao.quantization as ao

        kind, options = _SCHEMES[self.scheme]
        if self.group_size is not None:
            options = {**options, "group_size": self.group_size}
        with torch.device("meta"):
            layer = nn.Linear(weight.shape[1], len(weight), bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        ao.quantize_(layer, getattr(ao, kind)(**options))
        found = layer.weight.detach()
        del layer.weight  # torchao adds a reference cycle to the layer, which would delay freeing the weight
        return found

    def made(self, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return isinstance(module, nn.Linear) and type(weight).__module__.startswith("torchao.")

    def saved(self, layer: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        flatten = _safetensors_function("flatten_tensor_state_dict")
        try:
            tensors, texts = flatten({_NAME: layer.weight})
        except ValueError as error:
            raise ConfigurationError(
                f"torchao {version('torchao')} cannot save {self.scheme!r} weights ({error}). Install torchao>=0.18, "
                "which needs a newer torch than 2.9.",
            ) from error
        return {name.removeprefix(_PREFIX): value for name, value in tensors.items()}, texts

    def opened(
        self, layer: nn.Linear, tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device
    ) -> nn.Module:
        unflatten = _safetensors_function("unflatten_tensor_state_dict")
        made_of = unflatten({f"{_PREFIX}{name}": value.to(device) for name, value in tensors.items()}, dict(texts))
        found, left = made_of if isinstance(made_of, tuple) else (made_of, {})  # older versions return only a dict
        if left or _NAME not in found:
            raise CheckpointError(f"torchao cannot rebuild a weight from {', '.join(sorted(tensors))}.")
        made = linear_like(layer, nn.Linear)
        made.weight = nn.Parameter(found[_NAME], requires_grad=False)
        return made  # type: ignore[no-any-return]

    def as_dict(self) -> dict[str, Any]:
        return {"scheme": self.scheme} | ({} if self.group_size is None else {"group_size": self.group_size})


def _has_independent_rows(first: Tensor, second: Tensor) -> bool:
    parts = [dict(plain_parts(each)) for each in (first, second)]
    alike = all(
        part.dim() and len(part) == rows for rows, found in zip(_PROBED, parts, strict=True) for part in found.values()
    )
    return alike and parts[0].keys() == parts[1].keys() and contexts_of(first) == contexts_of(second)


def _safetensors_function(name: str) -> Callable[..., Any]:
    import torchao.prototype.safetensors.safetensors_support as support

    found: Callable[..., Any] = getattr(support, name)
    return found
