"""Public names of a package whose modules are imported when a name is first asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any


def load_export(name: str, exports: Mapping[str, str], namespace: dict[str, Any]) -> Any:
    """Import what a package's `__getattr__` was asked for, and keep it there."""
    if name not in exports:
        raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
    value = namespace[name] = getattr(importlib.import_module(exports[name]), name)
    return value


def public_names(package: str) -> list[str]:
    """The names that a package of lazy exports offers; nothing of what they are is imported. None without the package.

    Args:
        package: Its name.
    """
    return list(importlib.import_module(package).__all__) if importlib.util.find_spec(package) else []


def package_version() -> str:
    """Return the version of drivetrain, without an import of the package that exports all rooms."""
    return str(sys.modules["drivetrain"].__version__)
