"""The loop: `Trainer`, `Task`, `DataModule`, and what they count and log."""

from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.megatron_task import MegatronTask
from drivetrain.trainer.task import Task
from drivetrain.trainer.trainer import Trainer

__all__ = ["DataModule", "MegatronTask", "Task", "Trainer"]
