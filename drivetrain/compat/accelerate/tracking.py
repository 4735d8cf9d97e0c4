"""Trackers under Accelerate's names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from inspect import Parameter, Signature
from typing import Any

from drivetrain import trackers
from drivetrain.compat.accelerate.absent import absent
from drivetrain.compat.instances import StandsFor
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trackers import TensorBoardLogger, find_tracker, on_main_process, resolve_trackers
from drivetrain.trackers.group import ALIASES
from drivetrain.trackers.registry import TRACKERS

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "GeneralTracker",
    "TensorBoardTracker",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

filter_trackers = resolve_trackers


class GeneralTracker(trackers.GeneralTracker):
    """`drivetrain.GeneralTracker` that logs synchronously, so that a script can read values at once."""

    in_background = False


class TrackerClasses(MutableMapping[str, type[trackers.Tracker]]):
    """Mapping from tracker names to classes for `log_with`, drivetrain's own trackers included."""

    def __getitem__(self, name: str) -> type[trackers.Tracker]:
        if name not in TRACKERS and name not in ALIASES:
            raise KeyError(name)
        return find_tracker(name)

    def __setitem__(self, name: str, tracker: type[trackers.Tracker]) -> None:
        TRACKERS[name] = tracker

    def __delitem__(self, name: str) -> None:
        del TRACKERS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(TRACKERS))

    def __len__(self) -> int:
        return len(TRACKERS)


LOGGER_TYPE_TO_CLASS = TrackerClasses()


def register_tracker_class(tracker_class: type[Any]) -> type[Any]:
    """Register a tracker class under its `name` for `log_with`. Replaces a class of the same name.

    Args:
        tracker_class: Subclass of `GeneralTracker` with `name` and `requires_logging_directory`. Its arguments are the
            project name, the logging directory if required, and the tracker's entry in `init_kwargs`.

    Returns:
        The class.

    Raises:
        ConfigurationError: It is not such a class.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, trackers.GeneralTracker)):
        raise ConfigurationError(f"{tracker_class!r} is not a subclass of GeneralTracker.", see="trackers.md")
    for name in ("name", "requires_logging_directory"):
        if getattr(tracker_class, name, "") == "":
            raise ConfigurationError(f"{tracker_class.__qualname__} has no `{name}`. Define it in the class.")
    known = LOGGER_TYPE_TO_CLASS.get(tracker_class.name)
    if known is not None:
        warnings.warn(
            f"The tracker name {tracker_class.name!r} belonged to {known.__qualname__}, which log_with does not find "
            f"any more: it is {tracker_class.__qualname__} now.",
            UserWarning,
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class
    return tracker_class


class TensorBoardTracker(TensorBoardLogger, metaclass=StandsFor, original=TensorBoardLogger):
    """Tracker that writes TensorBoard event files to `<logging_dir>/<run_name>`."""

    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(logging_dir, run_name, version="", **kwargs)
        self.run_name, self.logging_dir, self.init_kwargs = run_name, os.path.join(logging_dir, run_name), kwargs


_PROJECT = {"run_name": "project"}
# Accelerate's class -> ours, and the arguments of its constructor, in order, with what they are called there
_CLASSES: dict[str, tuple[str, dict[str, str]]] = {
    "AimTracker": ("AimLogger", {"run_name": "experiment", "logging_dir": "repo"}),
    "ClearMLTracker": ("ClearMLLogger", {"run_name": "project_name"}),
    "CometMLTracker": ("CometLogger", {"run_name": "project_name"}),
    "DVCLiveTracker": ("DVCLiveLogger", {"run_name": "run_name", "live": "live"}),
    "MLflowTracker": (
        "MLFlowLogger",
        {
            name: name
            for name in ("experiment_name", "logging_dir", "run_id", "tags", "nested_run", "run_name", "description")
        },
    ),
    "SwanLabTracker": ("SwanLabLogger", _PROJECT),
    "TrackioTracker": ("TrackioLogger", _PROJECT),
    "WandBTracker": ("WandbLogger", _PROJECT),
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    original, arguments = _CLASSES[name]
    found = getattr(trackers, original, None)
    if found is None:
        return absent(name, "Pass its name to log_with instead.")
    globals()[name] = made = _with_arguments(name, found, arguments)
    return made


def _with_arguments(name: str, original: Any, arguments: Mapping[str, str]) -> type:
    """Return a class that creates a drivetrain tracker from the arguments of Accelerate's constructor."""

    class Made(original, metaclass=StandsFor, original=original):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            given = dict(zip(arguments, args, strict=False)) | options
            super().__init__(**{arguments.get(word, word): value for word, value in given.items()})

    Made.__name__ = Made.__qualname__ = name
    Made.__doc__ = f"`drivetrain.{original.__name__}` with the arguments of Accelerate's `{name}`."
    words = [Parameter(word, Parameter.POSITIONAL_OR_KEYWORD, default=None) for word in arguments]
    made: Any = Made
    made.__signature__ = Signature([*words, Parameter("kwargs", Parameter.VAR_KEYWORD)])
    return Made


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return trackers.available_trackers()
