"""The hooks of a module and of its data, by their kinds."""

from __future__ import annotations

from drivetrain.trainer.data_module import DataHooks
from drivetrain.trainer.task import TaskHooks as CheckpointHooks
from drivetrain.trainer.task import TaskHooks as ModelHooks

__all__ = ["CheckpointHooks", "DataHooks", "ModelHooks"]
