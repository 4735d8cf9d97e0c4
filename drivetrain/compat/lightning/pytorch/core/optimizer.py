"""The optimizer as a step by hand gets it."""

from __future__ import annotations

from drivetrain.accelerator import PreparedOptimizer as LightningOptimizer

__all__ = ["LightningOptimizer"]
