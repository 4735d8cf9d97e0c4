"""A command line for a training script: `TrainerCLI`, and what it is made of."""

from drivetrain.trainer.cli.instantiation import instantiate_class, instantiate_module
from drivetrain.trainer.cli.parser import TrainerArgumentParser
from drivetrain.trainer.cli.save_config import SaveConfigCallback
from drivetrain.trainer.cli.trainer_cli import TrainerCLI
from drivetrain.trainer.cli.types import ArgsType, LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau

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
