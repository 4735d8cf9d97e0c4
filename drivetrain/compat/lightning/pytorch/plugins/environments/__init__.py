"""Cluster environments, the same as those of Fabric."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.fabric.plugins import environments


def __getattr__(name: str) -> Any:
    return getattr(environments, name)
