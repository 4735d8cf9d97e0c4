"""Experiment trackers, one a file: where the values of a run are written."""

from __future__ import annotations

from drivetrain.trackers.base import Tracker
from drivetrain.trackers.csv import CSVLogger
from drivetrain.trackers.registry import available_trackers, register_tracker, resolve_trackers
from drivetrain.trackers.tensorboard import TensorBoardLogger

__all__ = [
    "CSVLogger",
    "TensorBoardLogger",
    "Tracker",
    "available_trackers",
    "register_tracker",
    "resolve_trackers",
]
