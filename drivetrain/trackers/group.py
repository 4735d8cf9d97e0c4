"""The trackers of one run, called together: for the Trainer and for a raw loop alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.trackers.absent import AbsentTracker
from drivetrain.trackers.background import BackgroundTracker, as_numbers
from drivetrain.trackers.base import COMPLETED, STATUS_WORDS, Tracker, write_hyper_parameters, write_values
from drivetrain.trackers.directory import DirectoryTracker
from drivetrain.trackers.losses import Losses
from drivetrain.trackers.media import as_rows
from drivetrain.trackers.secrets import Secrets

ALIASES = {"comet_ml": "comet"}
"""Accelerate's names of trackers that have another one here."""
_RECORDED = "recorded"  # the entry of a checkpoint that has the state of `recorder`


class TrackerGroup:
    """Calls the trackers of a run: on the main process, each guarded, the slow ones on threads of their own.

    What a tracker raises becomes one warning for each cause, and what it could not write is counted and reported at
    the end. Secrets among the hyper-parameters reach none of them.

    Args:
        trackers: The trackers, as they were given. The list may grow.
        is_main: Whether this is the main process.

    Attributes:
        trackers: The trackers, as they were given.
        recorder: What keeps the run's values for its report, where none of the trackers does; it is none of them.
    """

    def __init__(self, trackers: list[Tracker], is_main: bool) -> None:
        self.trackers = trackers
        self.recorder: Tracker | None = None
        self._is_main = is_main
        self._targets: dict[int, tuple[Tracker, Tracker, Losses]] = {}
        self._clean: Secrets | None = None

    @property
    def writes_here(self) -> bool:
        """Whether any tracker is called on this process."""
        return any(self._is_called(tracker) for tracker in self._writers)

    @property
    def keeps_values(self) -> bool:
        """Whether values are written by any process."""
        return bool(self.trackers) or self.recorder is not None

    @property
    def _writers(self) -> list[Tracker]:
        """The trackers, and what keeps values for the report."""
        return self.trackers if self.recorder is None else [*self.trackers, self.recorder]

    def record_with(self, recorder: Tracker | None) -> None:
        """Let another tracker, which is none of those that were given, keep the values for the run's report.

        Args:
            recorder: The tracker; None for none.
        """
        self.recorder = recorder

    @property
    def secrets(self) -> Secrets:
        """What none of the trackers may get, nor a checkpoint."""
        if self._clean is None:
            self._clean = Secrets(each for tracker in self.trackers for each in tracker.secrets)
        return self._clean

    # before

    def start(self) -> None:
        """Import what trackers need, and let those with a thread of their own open their runs there."""
        self._clean = None
        self._each(lambda target: target.load())
        self._each(lambda target: target.start() if isinstance(target, BackgroundTracker) else None)

    def share_directories(self) -> None:
        """Let all processes write to the directories that the main process has taken; all of them call it."""
        held = [each.run_directory for each in self._writers if isinstance(each, DirectoryTracker)]
        [versions] = broadcast_object_list([[each.version for each in held] if self._is_main else None])
        for directory, version in zip(held, versions, strict=False):
            directory.version = version

    def open(self) -> None:
        """Open the runs of all trackers."""
        self._clean = None
        self._each(lambda target: target.load())
        self._each(lambda target: target.start())

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write hyper-parameters, without secrets."""
        if self.writes_here:
            shown = self.secrets.hide(dict(values))
            self._each(lambda target: write_hyper_parameters(target, shown), len(shown))

    def log_graph(self, model: Any) -> None:
        """Write the structure of a model, to trackers that show it."""
        self._each_given(lambda target: target.log_graph(model))

    # during

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Write values of one step.

        Args:
            values: Names and values.
            step: The optimizer step.
            options: Further arguments of a tracker's `log`, by its name.
        """
        if not self.writes_here:
            return
        kept = as_numbers(values, self.secrets)
        by_name = {ALIASES.get(name, name): given for name, given in (options or {}).items()}
        for tracker in self._writers:
            given = by_name.get(tracker.name, {})
            self._call(tracker, partial(_log, values=kept, step=step, options=given), len(kept))

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write images, to trackers that show them; see `Tracker.log_images`."""
        self._each_given(lambda target: target.log_images(values, step), len(values))

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write distributions, to trackers that show them; see `Tracker.log_histogram`."""
        self._each_given(lambda target: target.log_histogram(values, step), len(values))

    def log_table(self, name: str, columns: Sequence[str] | None, data: Any, step: int | None = None) -> None:
        """Write a table, to trackers that show it; see `Tracker.log_table`."""
        if self.writes_here:
            titles, rows = as_rows(columns, data)
            kept = self.secrets.hide(rows)
            self._each_given(lambda target: target.log_table(name, titles, kept, step=step), 1)

    def save(self) -> None:
        """Bring everything logged so far to its place."""
        self._each(lambda target: target.save())

    def checkpoint_saved(self, callback: Any) -> None:
        """Let the trackers see what a checkpoint callback has saved, those that have `after_save_checkpoint`.

        Args:
            callback: The callback.
        """
        for tracker in self.trackers:
            if type(tracker).after_save_checkpoint is not Tracker.after_save_checkpoint:
                self._call(tracker, lambda target: target.after_save_checkpoint(callback))

    # the end

    def log_best_model(self, path: str | os.PathLike[str]) -> None:
        """Give the best checkpoint to the trackers that want it."""
        for tracker in self.trackers:
            if tracker.log_model:
                self._call(tracker, lambda target: target.log_artifact(path, "best"))

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        """Record how the run ended, write what is left, close the runs and report what was lost.

        Args:
            status: How it ended; see `Tracker.finalize`.
            message: The first line of the error that ended it.
        """
        text = self.secrets.in_text(message) if message else ""
        self._each(lambda target: target.record_end(STATUS_WORDS.get(status, status), text))
        for _, _, losses in self._targets.values():
            losses.report()

    # the state of the run

    def state(self) -> list[dict[str, Any]]:
        """What a resumed run needs of each tracker; nothing on other processes than the main one."""
        if not self._is_main:
            return []
        states: list[dict[str, Any]] = []
        for tracker in self.trackers:
            states.append({})
            self._call(tracker, lambda target: states[-1].update(target.state_dict()), 0)
        if self.recorder is not None:
            recorded: dict[str, Any] = {}
            self._call(self.recorder, lambda target: recorded.update(target.state_dict()), 0)
            states.append({_RECORDED: recorded})
        return states

    def load_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Let each tracker continue where a run was.

        Args:
            states: What `state` returned there.

        Raises:
            CheckpointError: No run writes such a state.
        """
        if self._is_main:
            given = [state for state in states if _RECORDED not in state]
            for tracker, state in zip(self.trackers, given, strict=False):
                self._call(tracker, partial(_load, state=state))
            recorded = next((state[_RECORDED] for state in states if _RECORDED in state), None)
            if self.recorder is not None and isinstance(recorded, Mapping):
                self._call(self.recorder, partial(_load, state=recorded))

    # one tracker

    def get(self, name: str) -> Tracker:
        """The tracker with a name; one that does nothing, on a process that does not call it.

        Args:
            name: The name of its class, such as `"csv"`, or Accelerate's.

        Raises:
            ConfigurationError: There is none with this name.
        """
        wanted = ALIASES.get(name, name)
        for tracker in self.trackers:
            if tracker.name == wanted:
                return tracker if self._is_called(tracker) else AbsentTracker(wanted)
        known = ", ".join(repr(tracker.name) for tracker in self.trackers) or "none"
        raise ConfigurationError(f"There is no tracker {name!r} in this run, which has: {known}.", code="DT-001")

    def _is_called(self, tracker: Tracker) -> bool:
        return self._is_main or not tracker.main_process_only

    def _each(self, call: Callable[[Tracker], Any], values: int = 0) -> None:
        for tracker in self._writers:
            self._call(tracker, call, values)

    def _each_given(self, call: Callable[[Tracker], Any], values: int = 0) -> None:
        for tracker in self.trackers:
            self._call(tracker, call, values)

    def _call(self, tracker: Tracker, call: Callable[[Tracker], Any], values: int = 0) -> None:
        """Call one tracker, or what calls it in the background; what it raises is counted."""
        if not self._is_called(tracker):
            return
        target, losses = self._target(tracker)
        losses.count_given(values)
        try:
            call(target)
        except CheckpointError:
            raise
        except Exception as error:
            losses.secrets = self.secrets
            losses.count_lost(values, error)

    def _target(self, tracker: Tracker) -> tuple[Tracker, Losses]:
        known = self._targets.get(id(tracker))
        if known is None:
            # One that every process calls may hold collectives, which must stay in the order of the loop.
            is_separate = tracker.in_background and tracker.main_process_only
            target = BackgroundTracker(tracker) if is_separate else tracker
            known = self._targets[id(tracker)] = (tracker, target, Losses(type(tracker).__name__))
        return known[1], known[2]


def _log(target: Any, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
    write_values(target, dict(values), step, **options)


def _load(target: Tracker, state: Mapping[str, Any]) -> None:
    target.load_state_dict(state)
