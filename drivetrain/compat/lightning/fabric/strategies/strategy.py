"""The base of strategies."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.strategies.strategy import Strategy

__all__ = ["Strategy"]
