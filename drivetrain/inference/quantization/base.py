"""Base class and registry of quantizers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drivetrain.runtime.errors import ConfigurationError, nearest

_PIECES = 16  # a weight is quantized in this many pieces, since each needs up to seven times its own memory


class Quantizer(ABC):
    """Base class of quantizers, which replace linear layers with layers that store weights in fewer bits.

    Subclasses become available by name with `register_quantizer`.

    Attributes:
        name: Name of the quantizer in files and in `get_quantizer`.
        dtype: Default dtype of the layers that are not quantized, or None to keep theirs.
    """

    name: ClassVar[str]
    dtype: torch.dtype | None = None

    @abstractmethod
    def check(self) -> None:
        """Raise an error if the package that this quantizer needs is missing or does not work on this machine.

        Raises:
            ConfigurationError: It is not. The message names the package to install.
        """

    def takes(self, module: nn.Module) -> bool:
        """Return True if this quantizer can replace `module` with a quantized layer.

        By default, only exact `nn.Linear` modules.

        Args:
            module: The module.
        """
        return type(module) is nn.Linear

    @abstractmethod
    def quantize(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Return a new layer with `weight` in quantized form and the bias of `layer`, to replace `layer` in a model.

        Args:
            layer: The layer. Its bias is used unchanged.
            weight: The layer's weight, on the CPU or the device. It may be memory-mapped and have another dtype than
                `layer.weight`.
            device: Device of the new layer.
        """

    @abstractmethod
    def made(self, module: nn.Module) -> bool:
        """Return True if `module` is a quantized layer that a quantizer of this class has created.

        Args:
            module: The module.
        """

    @abstractmethod
    def saved(self, layer: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return a quantized layer as plain tensors and strings, which a safetensors file can store.

        Args:
            layer: The layer.

        Returns:
            Plain tensors by their names in the layer, and texts that describe them.
        """

    @abstractmethod
    def opened(
        self, layer: nn.Linear, tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device
    ) -> nn.Module:
        """Create a quantized layer from saved tensors and strings, when a quantized model is loaded from a file.

        Args:
            layer: The layer to replace.
            tensors: The plain tensors.
            texts: The texts.
            device: Device of the new layer.
        """

    def finds(self, names: Collection[str]) -> bool:
        """Return True if a saved layer was quantized by this class, which the names of its tensors show.

        Args:
            names: Names of a layer's tensors in the file, without the bias.
        """
        return False

    def settle(self, layer: nn.Module) -> None:
        """Enable the backward pass of a quantized layer whose library has packed the weight for fast inference.

        Args:
            layer: The layer.
        """

    def parts(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that make up a layer's quantized weight, such as its values and scales, by name.

        Args:
            layer: The layer.

        Returns:
            A dict from the names that `bind` expects to tensors.
        """
        return weight_parts(layer)

    def bind(self, layer: nn.Module, parts: Mapping[str, Tensor]) -> None:
        """Replace the tensors that represent a layer's quantized weight, such as values and scales, with `parts`.

        Args:
            layer: The layer.
            parts: The new tensors, by the names of `parts`.
        """
        bind_weight(layer, parts)

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the constructor arguments that recreate this quantizer."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"


def pieces_of(layer: nn.Linear, weight: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    # Quantizing needs several times the memory of its input, so small blocks of rows save memory.
    step = max(1, -(-len(weight) // _PIECES))
    for start in range(0, len(weight), step):
        rows = slice(start, min(start + step, len(weight)))
        yield rows, weight[rows].to(device, layer.weight.dtype)


def weight_parts(layer: nn.Module) -> dict[str, Tensor]:
    weight: Any = layer.weight
    return dict(plain_parts(weight.detach()))


def plain_parts(tensor: Tensor, name: str = "weight") -> Iterator[tuple[str, Tensor]]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
    else:
        for inner in flatten()[0]:
            yield from plain_parts(getattr(tensor, inner), f"{name}.{inner}")


def contexts_of(tensor: Tensor) -> list[str]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, context = flatten()
    return [repr(context), *(text for inner in names for text in contexts_of(getattr(tensor, inner)))]


def bind_weight(layer: nn.Module, parts: Mapping[str, Tensor]) -> None:
    weight: Any = layer.weight
    layer.weight = nn.Parameter(rebuilt(weight.detach(), parts, weight.shape), requires_grad=False)


def rebuilt(like: Any, parts: Mapping[str, Tensor], shape: torch.Size, name: str = "weight") -> Tensor:
    flatten = getattr(like, "__tensor_flatten__", None)
    if flatten is None:
        return parts[name]
    names, context = flatten()
    inner = {each: rebuilt(getattr(like, each), parts, shape, f"{name}.{each}") for each in names}
    # With the strides of a contiguous matrix.
    made: Tensor = type(like).__tensor_unflatten__(inner, context, shape, (shape[1], 1))
    return made


def linear_like(layer: nn.Linear, kind: type[nn.Linear], **options: Any) -> Any:
    with torch.device("meta"):
        # On the meta device, since the weight is replaced anyway.
        made = kind(layer.in_features, layer.out_features, bias=False, **options)
    made.bias = layer.bias
    made.train(layer.training)
    return made


# Registry


# name -> (module, class, arguments)
_BUILT_IN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nf4": ("bitsandbytes", "BitsAndBytes", {"bits": 4, "quant_type": "nf4"}),
    "fp4": ("bitsandbytes", "BitsAndBytes", {"bits": 4, "quant_type": "fp4"}),
    "int8": ("bitsandbytes", "BitsAndBytes", {"bits": 8}),
    "int8wo": ("torchao", "TorchAO", {"scheme": "int8wo"}),
    "int8dq": ("torchao", "TorchAO", {"scheme": "int8dq"}),
    "int4wo": ("torchao", "TorchAO", {"scheme": "int4wo"}),
    "float8wo": ("torchao", "TorchAO", {"scheme": "float8wo"}),
    "float8dq": ("torchao", "TorchAO", {"scheme": "float8dq"}),
}
_CLASSES: dict[str, tuple[str, str]] = {
    "bitsandbytes": ("drivetrain.inference.quantization.bitsandbytes", "BitsAndBytes"),
    "torchao": ("drivetrain.inference.quantization.torchao", "TorchAO"),
}
_registered: dict[str, type[Quantizer]] = {}


def register_quantizer(kind: type[Quantizer]) -> type[Quantizer]:
    """Register a quantizer class, so that users can select it by its `name`.

    Also a class decorator.

    Args:
        kind: The class. Its name must not be in use.

    Returns:
        The class.

    Raises:
        ConfigurationError: The name is already in use.
    """
    if kind.name in {*_BUILT_IN, *_CLASSES} or _registered.get(kind.name, kind) is not kind:
        raise ConfigurationError(f"A quantizer named {kind.name!r} already exists. Rename {kind.__name__}.")
    _registered[kind.name] = kind
    return kind


def get_quantizer(given: str | Quantizer) -> Quantizer:
    """Return the quantizer for a name such as `"nf4"`, or `given` itself if it is a quantizer.

    Args:
        given: `"nf4"`, `"fp4"` or `"int8"` (bitsandbytes), `"int8wo"`, `"int8dq"`, `"int4wo"`, `"float8wo"` or
            `"float8dq"` (torchao), a registered name, or a quantizer.

    Raises:
        ConfigurationError: The name is unknown.
    """
    if isinstance(given, Quantizer):
        return given
    if given in _registered:
        return _registered[given]()
    if given not in _BUILT_IN:
        known = [*_BUILT_IN, *_registered]
        raise ConfigurationError(
            f"Unknown quantizer {given!r}. Use one of {', '.join(known)}.{nearest(str(given), known)}",
        )
    module, _, options = _BUILT_IN[given]
    found: Quantizer = class_of(module)(**options)
    return found


def class_of(name: str) -> type[Any]:
    if name in _registered:
        return _registered[name]
    if name not in _CLASSES:
        raise ConfigurationError(
            f"There is no quantizer {name!r}. Known: {', '.join([*_CLASSES, *_registered])}. Register it first.",
        )
    module, kind = _CLASSES[name]
    found: type[Any] = getattr(importlib.import_module(module), kind)
    return found
