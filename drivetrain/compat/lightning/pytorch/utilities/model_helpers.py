"""Whether a hook is overridden."""

from __future__ import annotations

from typing import Any

from drivetrain import Callback, DataModule, Task
from drivetrain.trainer import hooks


def is_overridden(method_name: str, instance: object | None = None, parent: type[Any] | None = None) -> bool:
    """Whether an object has its own version of a hook.

    Args:
        method_name: The hook.
        instance: The object.
        parent: The class whose hook it is; found if None.
    """
    if instance is None:
        return False
    base = parent or next((kind for kind in (Task, DataModule, Callback) if isinstance(instance, kind)), None)
    if base is None:
        raise ValueError("Expected a parent")
    return hasattr(instance, method_name) and hooks.is_overridden(instance, base, method_name)
