"""Trackers under Accelerate's names."""

from __future__ import annotations

from typing import Any

from drivetrain import trackers
from drivetrain.compat.accelerate.absent import absent
from drivetrain.trackers import ClearMLLogger as ClearMLTracker
from drivetrain.trackers import CometLogger as CometMLTracker
from drivetrain.trackers import GeneralTracker, on_main_process, register_tracker, resolve_trackers
from drivetrain.trackers import TensorBoardLogger as TensorBoardTracker

__all__ = [
    "ClearMLTracker",
    "CometMLTracker",
    "GeneralTracker",
    "TensorBoardTracker",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

register_tracker_class = register_tracker
filter_trackers = resolve_trackers

# Accelerate's class -> ours, of those that are looked up on first use
_CLASSES = {
    "AimTracker": "AimLogger",
    "DVCLiveTracker": "DVCLiveLogger",
    "MLflowTracker": "MLflowLogger",
    "SwanLabTracker": "SwanLabLogger",
    "TrackioTracker": "TrackioLogger",
    "WandBTracker": "WandbLogger",
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(trackers, _CLASSES[name], None)
    return found if found is not None else absent(name, "Pass its name to log_with instead.")


def get_available_trackers() -> list[str]:
    """Names of the trackers whose packages are installed."""
    return trackers.available_trackers()
