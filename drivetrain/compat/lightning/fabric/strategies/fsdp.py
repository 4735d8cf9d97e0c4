"""A model that is sharded: the same as for the Trainer."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.strategies.fsdp import FSDPStrategy

__all__ = ["FSDPStrategy"]
