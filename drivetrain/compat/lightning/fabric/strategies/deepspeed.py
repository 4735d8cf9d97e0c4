"""DeepSpeed's ZeRO: the same as for the Trainer."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
