"""Alias of `drivetrain.compat.accelerate.utils`, so that ported scripts only change the package's name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_THERE = "drivetrain.compat.accelerate.utils"


def __getattr__(name: str) -> Any:
    try:
        return getattr(import_module(_THERE), name)
    except AttributeError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error


def __dir__() -> list[str]:
    return dir(import_module(_THERE))
