"""What happens around the loop: one callback a file."""

from __future__ import annotations

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.device_stats_monitor import DeviceStatsMonitor
from drivetrain.callbacks.early_stopping import EarlyStopping
from drivetrain.callbacks.evaluation_gather import EvaluationGather
from drivetrain.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from drivetrain.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from drivetrain.callbacks.gradient_norm import GradientNorm
from drivetrain.callbacks.lambda_callback import LambdaCallback
from drivetrain.callbacks.loss_spike_guard import LossSpikeGuard
from drivetrain.callbacks.lr_monitor import LearningRateMonitor
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.callbacks.model_pruning import ModelPruning
from drivetrain.callbacks.model_summary import ModelSummary
from drivetrain.callbacks.nan_guard import NaNGuard
from drivetrain.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from drivetrain.callbacks.prediction_writer import BasePredictionWriter, PredictionWriter
from drivetrain.callbacks.progress_bar import TQDMProgressBar
from drivetrain.callbacks.rich_model_summary import RichModelSummary
from drivetrain.callbacks.rich_progress_bar import RichProgressBar
from drivetrain.callbacks.speed_monitor import SpeedMonitor
from drivetrain.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from drivetrain.callbacks.throughput_monitor import ThroughputMonitor
from drivetrain.callbacks.timer import Timer
from drivetrain.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "EvaluationGather",
    "GradientAccumulationScheduler",
    "GradientNorm",
    "LambdaCallback",
    "LearningRateMonitor",
    "LossSpikeGuard",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "NaNGuard",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "RichModelSummary",
    "RichProgressBar",
    "SpeedMonitor",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]
