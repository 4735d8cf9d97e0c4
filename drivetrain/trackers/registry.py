"""Registry of trackers by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.trackers.base import Tracker
from drivetrain.trackers.directory import DirectoryTracker, RunDirectory
from drivetrain.trackers.group import ALIASES

# Built-in trackers, imported on first use. Those whose module is missing are omitted.
TRACKERS: dict[str, str | type[Tracker]] = {
    name: place
    for name, place in {
        "csv": "drivetrain.trackers.csv:CSVLogger",
        "tensorboard": "drivetrain.trackers.tensorboard:TensorBoardLogger",
        "comet": "drivetrain.trackers.comet:CometLogger",
        "clearml": "drivetrain.trackers.clearml:ClearMLLogger",
        "wandb": "drivetrain.trackers.wandb:WandbLogger",
        "mlflow": "drivetrain.trackers.mlflow:MLFlowLogger",
        "aim": "drivetrain.trackers.aim:AimLogger",
        "dvclive": "drivetrain.trackers.dvclive:DVCLiveLogger",
        "trackio": "drivetrain.trackers.trackio:TrackioLogger",
        "swanlab": "drivetrain.trackers.swanlab:SwanLabLogger",
    }.items()
    if find_spec(place.partition(":")[0]) is not None
}

TrackerClass = TypeVar("TrackerClass", bound=type[Tracker])


def register_tracker(tracker: TrackerClass) -> TrackerClass:
    """Register a tracker class under its `name`. Can be used as a class decorator.

    Args:
        tracker: The class. `Tracker.for_run` creates the tracker if a run selects it by name.

    Returns:
        The class.

    Raises:
        ConfigurationError: If the class has no name, or if the name belongs to another class.
    """
    name = getattr(tracker, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"{tracker.__qualname__} has no `name`. Define one in the class, such as name = 'mine'.",
            see="trackers.md",
        )
    known = _registered(name)
    # The same class may be registered again, for example by a notebook cell that runs twice.
    if known is not None and known.__qualname__ != tracker.__qualname__:
        raise ConfigurationError(
            f"The tracker name {name!r} belongs to {known.__qualname__}. Use another name for {tracker.__qualname__}.",
        )
    TRACKERS[name] = tracker
    return tracker


def _registered(name: str) -> type[Tracker] | None:
    known = TRACKERS.get(name)
    if isinstance(known, str):
        module, _, attribute = known.partition(":")
        known = TRACKERS[name] = getattr(import_module(module), attribute)
    return known


def find_tracker(name: str) -> type[Tracker]:
    """Return the tracker class with the given name or alias.

    Args:
        name: The name, such as `"csv"`.

    Raises:
        ConfigurationError: If no class has the name.
    """
    tracker = _registered(ALIASES.get(name, name))
    if tracker is None:
        raise ConfigurationError(
            f"There is no tracker {name!r}.{nearest(name, TRACKERS)} Known trackers: "
            f"{', '.join(map(repr, TRACKERS))}. `register_tracker` adds your own.",
        )
    return tracker


def available_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name in TRACKERS if find_tracker(name).is_available()]


def resolve_trackers(
    spec: bool | str | Tracker | Iterable[str | Tracker] | None,
    *,
    save_dir: str | os.PathLike[str] = ".",
    name: str | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Tracker]:
    """Return the trackers for `spec`, the argument `logger` of a Trainer, which can hold names and objects.

    Trackers that write files into the same directory, and have no version, share one version. All files of a run are
    then in the same folder.

    Args:
        spec: Names or aliases, tracker objects, or a list of both. `"all"` selects all installed trackers, True the
            CSV table, None and False none.
        save_dir: The root directory of all runs, for trackers given by name.
        name: The name of the project or experiment, for trackers given by name. If None, the default of each tracker.
        init_kwargs: Further arguments for trackers given by name: `{"tensorboard": {"flush_secs": 30}}`.

    Returns:
        The list of trackers.

    Raises:
        ConfigurationError: If a name is unknown, or if an item is neither a name nor a tracker.
    """
    if spec is None or spec is False:
        return []
    if spec is True:
        spec = "csv"
    wanted: list[Any] = list(spec) if isinstance(spec, Iterable) and not isinstance(spec, str) else [spec]
    trackers: list[Tracker] = []
    made: set[str] = set()
    for item in wanted:
        item = getattr(item, "value", item)  # an enum member
        if isinstance(item, str):
            names = available_trackers() if item == "all" else [ALIASES.get(item, item)]
            trackers += [_make(each, save_dir, name, init_kwargs) for each in names if each not in made]
            made.update(names)
        elif isinstance(item, Tracker):
            trackers.append(item)
        else:
            raise ConfigurationError(
                f"{item!r} is not a tracker. Pass a Tracker object, or one of the names "
                f"{', '.join(map(repr, TRACKERS))}.",
                see="trackers.md",
            )
    _share_version(trackers)
    return trackers


def _make(
    name: str,
    save_dir: str | os.PathLike[str],
    experiment: str | None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None,
) -> Tracker:
    given = {ALIASES.get(known, known): options for known, options in (init_kwargs or {}).items()}
    options = dict(given.get(name, {}))
    place, project = options.pop("save_dir", save_dir), options.pop("project", experiment)
    return find_tracker(name).for_run(place, project, **options)


def _share_version(trackers: Iterable[Tracker]) -> None:
    shared: dict[str, RunDirectory] = {}
    for tracker in trackers:
        if isinstance(tracker, DirectoryTracker) and not tracker.run_directory.is_decided:
            # Trackers with the same root share one object, and therefore one version number.
            root = str(tracker.run_directory.root.absolute())
            tracker.run_directory = shared.setdefault(root, tracker.run_directory)
