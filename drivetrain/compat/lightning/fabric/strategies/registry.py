"""Strategies by name: the same as for the Trainer."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.strategies.registry import StrategyRegistry as STRATEGY_REGISTRY

__all__ = ["STRATEGY_REGISTRY"]
