"""Quantizers by name."""

from __future__ import annotations

import importlib
from typing import Any

from drivetrain.inference.quantization.base import Quantizer
from drivetrain.runtime.errors import ConfigurationError, nearest

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
        raise ConfigurationError(
            f"There is a quantizer {kind.name!r} already. Give {kind.__name__}.name another one.", code="DT-016"
        )
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
            code="DT-001",
        )
    module, _, options = _BUILT_IN[given]
    found: Quantizer = class_of(module)(**options)
    return found


def class_of(name: str) -> type[Any]:
    """The class of quantizers whose `name` is this.

    Args:
        name: The name.
    """
    if name in _registered:
        return _registered[name]
    if name not in _CLASSES:
        raise ConfigurationError(
            f"There is no quantizer {name!r}; known: {', '.join([*_CLASSES, *_registered])}. Register it first.",
            code="DT-001",
        )
    module, kind = _CLASSES[name]
    found: type[Any] = getattr(importlib.import_module(module), kind)
    return found
