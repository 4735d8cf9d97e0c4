"""Experiment trackers, one a file: where the values of a run are written."""

from __future__ import annotations

from drivetrain.trackers.aim import AimLogger
from drivetrain.trackers.base import Tracker
from drivetrain.trackers.clearml import ClearMLLogger
from drivetrain.trackers.comet import CometLogger
from drivetrain.trackers.csv import CSVLogger
from drivetrain.trackers.dvclive import DVCLiveLogger
from drivetrain.trackers.general import GeneralTracker, on_main_process
from drivetrain.trackers.group import TrackerGroup
from drivetrain.trackers.mlflow import MLFlowLogger
from drivetrain.trackers.registry import available_trackers, register_tracker, resolve_trackers
from drivetrain.trackers.swanlab import SwanLabLogger
from drivetrain.trackers.tensorboard import TensorBoardLogger
from drivetrain.trackers.trackio import TrackioLogger
from drivetrain.trackers.wandb import WandbLogger

__all__ = [
    "AimLogger",
    "CSVLogger",
    "ClearMLLogger",
    "CometLogger",
    "DVCLiveLogger",
    "GeneralTracker",
    "MLFlowLogger",
    "SwanLabLogger",
    "TensorBoardLogger",
    "Tracker",
    "TrackerGroup",
    "TrackioLogger",
    "WandbLogger",
    "available_trackers",
    "on_main_process",
    "register_tracker",
    "resolve_trackers",
]
