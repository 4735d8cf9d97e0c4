"""Functions shared by loggers that need an external package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from drivetrain.trackers.service import missing_package


def check_installed(owner: str, package: str, extra: str) -> None:
    """Raise if a logger's package is not installed."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise missing_package(owner, package, extra)


def with_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values with their names prefixed by `<prefix>-`, or unchanged without a prefix."""
    return {f"{prefix}-{name}" if prefix else name: value for name, value in values.items()}
