"""Training loop: `Trainer`, `Task`, `DataModule`, and the progress and values that they record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.task import Task
from drivetrain.trainer.trainer import Trainer

__all__ = ["DataModule", "MegatronTask", "Task", "Trainer"]


def __getattr__(name: str) -> Any:
    return load_export(name, {"MegatronTask": "drivetrain.trainer.megatron_task"}, globals())


if TYPE_CHECKING:
    from drivetrain.trainer.megatron_task import MegatronTask as MegatronTask
