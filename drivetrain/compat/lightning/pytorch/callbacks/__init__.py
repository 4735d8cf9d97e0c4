"""Callbacks: those of `drivetrain.callbacks`. Those that it does not have raise when they are made."""

from __future__ import annotations

from drivetrain.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    Timer,
    TQDMProgressBar,
)
from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.pytorch.callbacks import progress
from drivetrain.compat.lightning.pytorch.callbacks.checkpoint import Checkpoint
from drivetrain.compat.lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.compat.lightning.reasons import CALLBACK

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "TQDMProgressBar",
    "Timer",
    "progress",
]

_ABSENT = (
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "ModelPruning",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "ThroughputMonitor",
    "WeightAveraging",
)

__getattr__ = absent_names(__name__, (CALLBACK, _ABSENT), room="drivetrain.callbacks")
