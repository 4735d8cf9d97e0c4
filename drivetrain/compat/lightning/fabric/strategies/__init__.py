"""Strategies under Lightning's class names, the same as those of the Trainer."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.pytorch import strategies


def __getattr__(name: str) -> Any:
    return getattr(strategies, "StrategyRegistry" if name == "STRATEGY_REGISTRY" else name)
