"""What a way of quantising weights has to provide."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drivetrain.runtime.errors import ConfigurationError, nearest

_PIECES = 16  # that a weight is quantised in; each takes up to seven times its memory


class Quantizer(ABC):
    """A way of storing the weights of linear layers in fewer bits. Each is a file; `register_quantizer` adds one.

    Attributes:
        name: The name that files and users give it.
        dtype: What the rest of a model is converted to where nothing else is asked for; None to leave it.
    """

    name: ClassVar[str]
    dtype: torch.dtype | None = None

    @abstractmethod
    def check(self) -> None:
        """See that its package is there and can do this on this machine.

        Raises:
            ConfigurationError: It is not; names what to install.
        """

    def takes(self, module: nn.Module) -> bool:
        """Whether it can store the weight of a module.

        Args:
            module: The module.
        """
        return type(module) is nn.Linear

    @abstractmethod
    def quantize(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Make the layer that is to be in the place of one, best from `pieces_of` its weight.

        Args:
            layer: The layer; its bias, if it has one, is given to the new one as it is.
            weight: Its weight, on the CPU or the device. It may be in a file, and in another dtype than `layer.weight`.
            device: Where the new layer is to be.
        """

    @abstractmethod
    def made(self, module: nn.Module) -> bool:
        """Whether a module is one that `quantize` has made.

        Args:
            module: The module.
        """

    @abstractmethod
    def saved(self, layer: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What of a quantised layer files hold, without its bias.

        Args:
            layer: The layer.

        Returns:
            Plain tensors by names within the layer, and texts that describe them.
        """

    @abstractmethod
    def opened(
        self, layer: nn.Linear, tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device
    ) -> nn.Module:
        """Make a quantised layer of what `saved` returned.

        Args:
            layer: The layer that it is to take the place of.
            tensors: The tensors.
            texts: The texts.
            device: Where the new layer is to be.
        """

    def finds(self, names: Collection[str]) -> bool:
        """Whether the names within a layer that files hold are those of one that is quantised already.

        Args:
            names: The names, without that of the bias.
        """
        return False

    def settle(self, layer: nn.Module) -> None:
        """Let a quantised layer compute alike in training and in evaluation, so that gradients pass it in both.

        Args:
            layer: The layer.
        """

    def parts(self, layer: nn.Module) -> dict[str, Tensor]:
        """The plain tensors that take most of a quantised layer's memory.

        Args:
            layer: The layer.

        Returns:
            The tensors, by names that `bind` takes.
        """
        return weight_parts(layer)

    def bind(self, layer: nn.Module, parts: Mapping[str, Tensor]) -> None:
        """Let a quantised layer compute with other tensors; what a forward before has kept for backward stays.

        Args:
            layer: The layer.
            parts: The tensors, by the names of `parts`.
        """
        bind_weight(layer, parts)

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Its options as plain values: `type(self)(**options)` is the same quantizer."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"


def pieces_of(layer: nn.Linear, weight: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of a weight after the other, on a device and in the layer's dtype.

    What quantises takes several times the memory of what it is given, which is little that way.
    """
    step = max(1, -(-len(weight) // _PIECES))
    for start in range(0, len(weight), step):
        rows = slice(start, min(start + step, len(weight)))
        yield rows, weight[rows].to(device, layer.weight.dtype)


def weight_parts(layer: nn.Module) -> dict[str, Tensor]:
    """The plain tensors that a layer's weight consists of, by names."""
    weight: Any = layer.weight
    return dict(plain_parts(weight.detach()))


def plain_parts(tensor: Tensor, name: str = "weight") -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that a tensor of any class consists of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
    else:
        for inner in flatten()[0]:
            yield from plain_parts(getattr(tensor, inner), f"{name}.{inner}")


def contexts_of(tensor: Tensor) -> list[str]:
    """What a tensor of any class has beside its plain tensors, as text."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, context = flatten()
    return [repr(context), *(text for inner in names for text in contexts_of(getattr(tensor, inner)))]


def bind_weight(layer: nn.Module, parts: Mapping[str, Tensor]) -> None:
    """Let a layer's weight consist of other tensors."""
    weight: Any = layer.weight
    layer.weight = nn.Parameter(rebuilt(weight.detach(), parts, weight.shape), requires_grad=False)


def rebuilt(like: Any, parts: Mapping[str, Tensor], shape: torch.Size, name: str = "weight") -> Tensor:
    """A tensor of the class of another one, of other plain tensors."""
    flatten = getattr(like, "__tensor_flatten__", None)
    if flatten is None:
        return parts[name]
    names, context = flatten()
    inner = {each: rebuilt(getattr(like, each), parts, shape, f"{name}.{each}") for each in names}
    made: Tensor = type(like).__tensor_unflatten__(inner, context, shape, (shape[1], 1))
    return made


def linear_like(layer: nn.Linear, kind: type[nn.Linear], **options: Any) -> Any:
    """A layer of another class with the sizes of one, and its bias."""
    with torch.device("meta"):
        made = kind(layer.in_features, layer.out_features, bias=False, **options)
    made.bias = layer.bias
    made.train(layer.training)
    return made


# Quantizers by name


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
    """Let a quantizer be found by its name; also a decorator.

    Args:
        kind: The class; its `name` must not be taken.

    Raises:
        ConfigurationError: The name is taken.
    """
    if kind.name in {*_BUILT_IN, *_CLASSES} or _registered.get(kind.name, kind) is not kind:
        raise ConfigurationError(f"There is a quantizer {kind.name!r} already. Give {kind.__name__}.name another one.")
    _registered[kind.name] = kind
    return kind


def get_quantizer(given: str | Quantizer) -> Quantizer:
    """A quantizer by its name.

    Args:
        given: `"nf4"`, `"fp4"` and `"int8"` of bitsandbytes, `"int8wo"`, `"int8dq"`, `"int4wo"`, `"float8wo"` and
            `"float8dq"` of torchao, the name of one that was registered, or a quantizer.

    Raises:
        ConfigurationError: There is none of this name.
    """
    if isinstance(given, Quantizer):
        return given
    if given in _registered:
        return _registered[given]()
    if given not in _BUILT_IN:
        known = [*_BUILT_IN, *_registered]
        raise ConfigurationError(
            f"There is no quantizer {given!r}. Give one of {', '.join(known)}.{nearest(str(given), known)}",
        )
    module, _, options = _BUILT_IN[given]
    found: Quantizer = class_of(module)(**options)
    return found


def class_of(name: str) -> type[Any]:
    """The class of quantizers whose `name` is this."""
    if name in _registered:
        return _registered[name]
    if name not in _CLASSES:
        raise ConfigurationError(
            f"There is no quantizer {name!r}; known: {', '.join([*_CLASSES, *_registered])}. Register it first.",
        )
    module, kind = _CLASSES[name]
    found: type[Any] = getattr(importlib.import_module(module), kind)
    return found
