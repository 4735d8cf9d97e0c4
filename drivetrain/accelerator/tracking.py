"""Experiment trackers of an Accelerator."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.accelerator.accelerate_names import ProjectConfiguration
from drivetrain.runtime import observer
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.trackers import GeneralTracker, Tracker, TrackerGroup, find_tracker, resolve_trackers
from drivetrain.trackers.base import outcome_of

LogWith = str | Tracker | Iterable[str | Tracker] | None


@dataclass(eq=False)
class RunTracking:
    state: PartialState
    project: ProjectConfiguration
    group: TrackerGroup
    log_with: LogWith = None
    _states: Sequence[Mapping[str, Any]] = field(default=(), init=False)

    def init(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        """Start a run in each experiment tracker that `log_with` selects."""
        # If trackers are running already, end their runs first.
        self.group.finalize()
        trackers = resolve_trackers(
            self.log_with, save_dir=self.project.logging_dir or ".", name=project_name, init_kwargs=init_kwargs
        )
        self.group = TrackerGroup(observer.observed(trackers), self.state.is_main_process)
        states, self._states = self._states, ()
        self.group.load_state(states)
        self.group.open()
        if config is not None:
            self.group.store_init_configuration(config)
        atexit.register(self._at_exit)

    def finish(self) -> None:
        """End the runs of all experiment trackers.

        They are marked as failed if an exception is being handled.
        """
        self._finish(sys.exc_info()[1])

    def leave(self) -> None:
        """Finish the experiment trackers, and destroy the process group of the run."""
        self.finish()
        self.state.destroy_process_group()

    def get(self, name: str, unwrap: bool) -> Any:
        found = self.group.get(name)
        return found.tracker if unwrap else found

    def _at_exit(self) -> None:
        # In an interactive session, `last_value` may be an old error that the user has seen and fixed.
        self._finish(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))

    def _finish(self, error: BaseException | None) -> None:
        atexit.unregister(self._at_exit)
        self.group.finalize(*outcome_of(error))

    # the state of the run

    def entries(self) -> dict[str, Any]:
        return {"trackers": self.group.state()} if self.group.trackers else {}

    def load(self, entries: Mapping[str, Any]) -> None:
        # Trackers that are created later continue these runs too.
        self._states = entries.get("trackers", ())
        if self.group.trackers:
            self.group.load_state(self._states)


def checked_trackers(log_with: str | Tracker | Iterable[str | Tracker]) -> LogWith:
    items: list[Any] = (
        list(log_with) if isinstance(log_with, Iterable) and not isinstance(log_with, str) else [log_with]
    )
    for item in items:
        if isinstance(item, type) and issubclass(item, Tracker):
            raise ConfigurationError(
                f"log_with contains the class {item.__name__}. Pass an instance instead: {item.__name__}()."
            )
    # Making them raises if a package is not installed. A class of the user's own is made by `init` alone.
    resolve_trackers([item for item in items if not _is_of_the_user(getattr(item, "value", item))])
    return items


def _is_of_the_user(item: Any) -> bool:
    return isinstance(item, str) and item != "all" and issubclass(find_tracker(item), GeneralTracker)
