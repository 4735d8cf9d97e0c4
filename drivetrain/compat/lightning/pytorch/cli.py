"""The command line, which is not here yet."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import CLI

_ABSENT = (
    "ArgsType",
    "LRSchedulerCallable",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "SaveConfigCallback",
    "instantiate_class",
)

__getattr__ = absent_names(__name__, (CLI, _ABSENT))
