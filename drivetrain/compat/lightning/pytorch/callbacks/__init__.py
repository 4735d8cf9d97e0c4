"""The callbacks of `drivetrain.callbacks`, with the additional members of Lightning's."""

from __future__ import annotations

from typing import Any

from drivetrain.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelSummary, Timer
from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.pytorch.callbacks import progress
from drivetrain.compat.lightning.pytorch.callbacks.checkpoint import Checkpoint
from drivetrain.compat.lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.compat.lightning.pytorch.callbacks.prediction_writer import BasePredictionWriter
from drivetrain.compat.lightning.pytorch.callbacks.progress import ProgressBar, TQDMProgressBar
from drivetrain.compat.lightning.pytorch.callbacks.spike import SpikeDetection
from drivetrain.compat.lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from drivetrain.compat.lightning.reasons import CALLBACK

__all__ = [
    "BasePredictionWriter",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "RichProgressBar",
    "SpikeDetection",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "progress",
]

_ABSENT = (
    "BackboneFinetuning",
    "BaseFinetuning",
    "BatchSizeFinder",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "ModelPruning",
    "OnExceptionCheckpoint",
    "RichModelSummary",
    "StochasticWeightAveraging",
    "WeightAveraging",
)

_get_callback = absent_names(__name__, (CALLBACK, _ABSENT), room="drivetrain.callbacks")


def __getattr__(name: str) -> Any:
    return progress.RichProgressBar if name == "RichProgressBar" else _get_callback(name)
