"""`lightning.pytorch`, also `pytorch_lightning`: the Trainer, modules, callbacks and loggers."""

from __future__ import annotations

import os

from drivetrain.callbacks import Callback
from drivetrain.compat.lightning.fabric.utilities import disable_possible_user_warnings
from drivetrain.compat.lightning.fabric.utilities.seed import seed_everything
from drivetrain.compat.lightning.pytorch import (
    accelerators,
    callbacks,
    core,
    loggers,
    plugins,
    profilers,
    strategies,
    trainer,
    tuner,
    utilities,
)
from drivetrain.compat.lightning.pytorch.core import LightningDataModule, LightningModule
from drivetrain.compat.lightning.pytorch.trainer import Trainer
from drivetrain.compat.lightning.version import VERSION as __version__

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "accelerators",
    "callbacks",
    "cli_lightning_logo",
    "core",
    "loggers",
    "plugins",
    "profilers",
    "seed_everything",
    "strategies",
    "trainer",
    "tuner",
    "utilities",
]

if os.environ.get("POSSIBLE_USER_WARNINGS", "").lower() in ("0", "off"):
    disable_possible_user_warnings()


def cli_lightning_logo() -> None:
    """Do nothing: there is no logo."""
