"""A copy of the model on each process: the same as for the Trainer."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.strategies.ddp import DDPStrategy

__all__ = ["DDPStrategy"]
