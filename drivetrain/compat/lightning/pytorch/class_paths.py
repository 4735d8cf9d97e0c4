"""Class paths in configuration files: Lightning's names for the mirror's classes."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from typing import Any

_ROOMS = ("callbacks", "loggers", "strategies", "profilers", "plugins")
_OURS = re.compile(r"\bdrivetrain(?:\.\w+)+")


def as_lightning(values: Any) -> Any:
    """Replace drivetrain's class paths in nested values by Lightning's, in place."""
    if not _is_installed():
        return values
    if isinstance(values, list):
        for each in values:
            as_lightning(each)
    elif hasattr(values, "__dict__") or isinstance(values, dict):
        entries = values if isinstance(values, dict) else vars(values)
        for key, each in entries.items():
            if key == "class_path" and isinstance(each, str):
                entries[key] = _lightning_path(each)
            else:
                as_lightning(each)
    return values


def as_lightning_text(text: str) -> str:
    """Replace drivetrain's class paths in a text by Lightning's."""
    return _OURS.sub(lambda found: _lightning_path(found[0]), text) if _is_installed() else text


def _is_installed() -> bool:
    """Return True if `import lightning` resolves to the mirror."""
    loaded = sys.modules.get("lightning")
    return loaded is not None and loaded.__name__ == "drivetrain.compat.lightning"


@cache
def _lightning_path(path: str) -> str:
    """Return Lightning's path of a class, or the same path if Lightning has none."""
    if path.startswith("drivetrain.compat.lightning."):
        return path.removeprefix("drivetrain.compat.")
    module, _, name = path.rpartition(".")
    if not path.startswith("drivetrain."):
        return path
    try:
        kind = getattr(importlib.import_module(module), name, None)
    except ImportError:  # other text with this prefix, such as a file name
        return path
    for room in _ROOMS:
        mirror = importlib.import_module(f"drivetrain.compat.lightning.pytorch.{room}")
        if kind is not None and getattr(mirror, name, None) is kind:
            return f"lightning.pytorch.{room}.{name}"
    return path
