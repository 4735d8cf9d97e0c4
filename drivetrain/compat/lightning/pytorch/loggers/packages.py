"""What loggers over a package of their own have in common."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from drivetrain.trackers.service import missing_package


def check_installed(owner: str, package: str, extra: str) -> None:
    """Refuse a logger whose package is not installed."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise missing_package(owner, package, extra)


def with_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Values under their names with a prefix and a `-` before them."""
    return {f"{prefix}-{name}" if prefix else name: value for name, value in values.items()}
