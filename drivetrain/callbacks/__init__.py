"""Callbacks: code that runs at fixed points around the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "BackboneFinetuning": "drivetrain.callbacks.finetuning",
    "BaseFinetuning": "drivetrain.callbacks.finetuning",
    "BasePredictionWriter": "drivetrain.callbacks.prediction_writer",
    "BatchSizeFinder": "drivetrain.callbacks.batch_size_finder",
    "Callback": "drivetrain.callbacks.base",
    "DeviceStatsMonitor": "drivetrain.callbacks.device_stats_monitor",
    "EarlyStopping": "drivetrain.callbacks.early_stopping",
    "EMAWeightAveraging": "drivetrain.callbacks.weight_averaging",
    "EvaluationGather": "drivetrain.callbacks.evaluation_gather",
    "GradientAccumulationScheduler": "drivetrain.callbacks.gradient_accumulation_scheduler",
    "GradientNorm": "drivetrain.callbacks.gradient_norm",
    "LambdaCallback": "drivetrain.callbacks.lambda_callback",
    "LearningRateFinder": "drivetrain.callbacks.learning_rate_finder",
    "LearningRateMonitor": "drivetrain.callbacks.lr_monitor",
    "LossSpikeGuard": "drivetrain.callbacks.guards",
    "MemoryMonitor": "drivetrain.callbacks.memory_monitor",
    "ModelCheckpoint": "drivetrain.callbacks.model_checkpoint",
    "ModelPruning": "drivetrain.callbacks.model_pruning",
    "ModelSummary": "drivetrain.callbacks.model_summary",
    "NaNGuard": "drivetrain.callbacks.guards",
    "OnExceptionCheckpoint": "drivetrain.callbacks.model_checkpoint",
    "PredictionWriter": "drivetrain.callbacks.prediction_writer",
    "RichModelSummary": "drivetrain.callbacks.rich_progress_bar",
    "RichProgressBar": "drivetrain.callbacks.rich_progress_bar",
    "RunReport": "drivetrain.callbacks.report.run_report",
    "SpeedMonitor": "drivetrain.callbacks.throughput_monitor",
    "StochasticWeightAveraging": "drivetrain.callbacks.weight_averaging",
    "StragglerMonitor": "drivetrain.callbacks.straggler_monitor",
    "ThroughputMonitor": "drivetrain.callbacks.throughput_monitor",
    "Timer": "drivetrain.callbacks.timer",
    "TQDMProgressBar": "drivetrain.callbacks.progress_bar",
    "WeightAveraging": "drivetrain.callbacks.weight_averaging",
    "WeightHistograms": "drivetrain.callbacks.weight_histograms",
}

__all__ = [*sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.callbacks.base import Callback as Callback
    from drivetrain.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from drivetrain.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from drivetrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from drivetrain.callbacks.evaluation_gather import EvaluationGather as EvaluationGather
    from drivetrain.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from drivetrain.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from drivetrain.callbacks.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from drivetrain.callbacks.gradient_norm import GradientNorm as GradientNorm
    from drivetrain.callbacks.guards import LossSpikeGuard as LossSpikeGuard
    from drivetrain.callbacks.guards import NaNGuard as NaNGuard
    from drivetrain.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from drivetrain.callbacks.learning_rate_finder import LearningRateFinder as LearningRateFinder
    from drivetrain.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from drivetrain.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from drivetrain.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from drivetrain.callbacks.model_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from drivetrain.callbacks.model_pruning import ModelPruning as ModelPruning
    from drivetrain.callbacks.model_summary import ModelSummary as ModelSummary
    from drivetrain.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from drivetrain.callbacks.prediction_writer import PredictionWriter as PredictionWriter
    from drivetrain.callbacks.progress_bar import TQDMProgressBar as TQDMProgressBar
    from drivetrain.callbacks.report.run_report import RunReport as RunReport
    from drivetrain.callbacks.rich_progress_bar import RichModelSummary as RichModelSummary
    from drivetrain.callbacks.rich_progress_bar import RichProgressBar as RichProgressBar
    from drivetrain.callbacks.straggler_monitor import StragglerMonitor as StragglerMonitor
    from drivetrain.callbacks.throughput_monitor import SpeedMonitor as SpeedMonitor
    from drivetrain.callbacks.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from drivetrain.callbacks.timer import Timer as Timer
    from drivetrain.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from drivetrain.callbacks.weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from drivetrain.callbacks.weight_averaging import WeightAveraging as WeightAveraging
    from drivetrain.callbacks.weight_histograms import WeightHistograms as WeightHistograms
