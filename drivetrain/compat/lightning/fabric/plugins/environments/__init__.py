"""Cluster environments, which the launcher finds by itself."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.pytorch.plugins import environments


def __getattr__(name: str) -> Any:
    return getattr(environments, name)
