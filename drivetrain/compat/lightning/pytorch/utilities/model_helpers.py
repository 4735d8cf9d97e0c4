"""Check for overridden hooks, and create torchvision models."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from drivetrain import Callback, DataModule, Task
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer import hooks


def is_overridden(method_name: str, instance: object | None = None, parent: type[Any] | None = None) -> bool:
    """Return True if an object overrides a hook of its base class."""
    if instance is None:
        return False
    base = parent or next((kind for kind in (Task, DataModule, Callback) if isinstance(instance, kind)), None)
    if base is None:
        raise ValueError("Expected a parent")
    return hasattr(instance, method_name) and hooks.is_overridden(instance, base, method_name)


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """Create a torchvision model by name."""
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError as error:
        raise ConfigurationError(
            f'get_torchvision_model({model_name!r}) needs torchvision. Install it: pip install "torchvision"',
        ) from error
    model: nn.Module = models.get_model(model_name, **kwargs)
    return model
