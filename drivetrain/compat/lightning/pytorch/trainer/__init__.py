"""The Trainer."""

from __future__ import annotations

from drivetrain.compat.lightning.fabric.utilities.seed import seed_everything
from drivetrain.compat.lightning.pytorch.trainer.trainer import Trainer

__all__ = ["Trainer", "seed_everything"]
