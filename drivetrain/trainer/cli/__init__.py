"""`TrainerCLI`: a command line for a training script."""

from drivetrain.trainer.cli.instantiation import instantiate_class, instantiate_module
from drivetrain.trainer.cli.parser import (
    ArgsType,
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    TrainerArgumentParser,
)
from drivetrain.trainer.cli.trainer_cli import SaveConfigCallback, TrainerCLI

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "TrainerArgumentParser",
    "TrainerCLI",
    "instantiate_class",
    "instantiate_module",
]
