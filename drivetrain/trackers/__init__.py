"""Experiment trackers, which write the values of a run to files or services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "AimLogger": "drivetrain.trackers.aim",
    "CSVLogger": "drivetrain.trackers.csv",
    "ClearMLLogger": "drivetrain.trackers.clearml",
    "CometLogger": "drivetrain.trackers.comet",
    "DVCLiveLogger": "drivetrain.trackers.dvclive",
    "GeneralTracker": "drivetrain.trackers.base",
    "MLFlowLogger": "drivetrain.trackers.mlflow",
    "SwanLabLogger": "drivetrain.trackers.swanlab",
    "TensorBoardLogger": "drivetrain.trackers.tensorboard",
    "Tracker": "drivetrain.trackers.base",
    "TrackerGroup": "drivetrain.trackers.group",
    "TrackioLogger": "drivetrain.trackers.trackio",
    "WandbLogger": "drivetrain.trackers.wandb",
    "available_trackers": "drivetrain.trackers.registry",
    "find_tracker": "drivetrain.trackers.registry",
    "on_main_process": "drivetrain.trackers.base",
    "register_tracker": "drivetrain.trackers.registry",
    "resolve_trackers": "drivetrain.trackers.registry",
}

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
    "find_tracker",
    "on_main_process",
    "register_tracker",
    "resolve_trackers",
]


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.trackers.aim import AimLogger as AimLogger
    from drivetrain.trackers.base import GeneralTracker as GeneralTracker
    from drivetrain.trackers.base import Tracker as Tracker
    from drivetrain.trackers.base import on_main_process as on_main_process
    from drivetrain.trackers.clearml import ClearMLLogger as ClearMLLogger
    from drivetrain.trackers.comet import CometLogger as CometLogger
    from drivetrain.trackers.csv import CSVLogger as CSVLogger
    from drivetrain.trackers.dvclive import DVCLiveLogger as DVCLiveLogger
    from drivetrain.trackers.group import TrackerGroup as TrackerGroup
    from drivetrain.trackers.mlflow import MLFlowLogger as MLFlowLogger
    from drivetrain.trackers.registry import available_trackers as available_trackers
    from drivetrain.trackers.registry import find_tracker as find_tracker
    from drivetrain.trackers.registry import register_tracker as register_tracker
    from drivetrain.trackers.registry import resolve_trackers as resolve_trackers
    from drivetrain.trackers.swanlab import SwanLabLogger as SwanLabLogger
    from drivetrain.trackers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from drivetrain.trackers.trackio import TrackioLogger as TrackioLogger
    from drivetrain.trackers.wandb import WandbLogger as WandbLogger
