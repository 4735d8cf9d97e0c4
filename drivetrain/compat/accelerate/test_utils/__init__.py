"""Helpers that Accelerate's test scripts, and those of projects based on it, import."""

from __future__ import annotations

import importlib
from typing import Any

_TRAINING = ("RegressionDataset", "RegressionModel", "RegressionModel4XPU")


def __getattr__(name: str) -> Any:
    if name in ("testing", "training"):
        return importlib.import_module(f"{__name__}.{name}")
    home = "training" if name in _TRAINING else "testing"
    try:
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
