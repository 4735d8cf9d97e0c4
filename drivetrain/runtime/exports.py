"""Lazy public names of a package: each module is imported on the first access to its name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any


def load_export(name: str, exports: Mapping[str, str], namespace: dict[str, Any]) -> Any:
    if name not in exports:
        raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
    value = namespace[name] = getattr(importlib.import_module(exports[name]), name)
    return value


def public_names(package: str) -> list[str]:
    """Return the names in `__all__` of a package, if it is installed."""
    return list(importlib.import_module(package).__all__) if importlib.util.find_spec(package) else []


def package_version() -> str:
    """Return drivetrain's version string."""
    return str(sys.modules["drivetrain"].__version__)
