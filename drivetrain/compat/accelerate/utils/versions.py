"""Compare versions."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from drivetrain.compat.accelerate.utils.constants import STR_OPERATION_TO_FUNC
from drivetrain.runtime.errors import ConfigurationError


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare a library's version, or a version, with another version."""
    from packaging.version import parse

    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigurationError(f"{operation!r} compares no versions; allowed: {', '.join(STR_OPERATION_TO_FUNC)}.")
    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return bool(STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version, as in `is_torch_version(">=", "2.9")`."""
    from packaging.version import parse

    return compare_versions(parse(parse(torch.__version__).base_version), operation, version)
