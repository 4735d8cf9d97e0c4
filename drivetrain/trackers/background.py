"""Trackers on a thread of their own, so that none of them stops or slows a step."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import TrackerError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState
from drivetrain.trackers.absent import Absent
from drivetrain.trackers.base import (
    COMPLETED,
    Tracker,
    hyperparameters_of,
    plain,
    write_hyper_parameters,
    write_values,
)
from drivetrain.trackers.call_queue import CallQueue
from drivetrain.trackers.losses import Losses, first_line, outcome_of
from drivetrain.trackers.media import as_array, as_images, as_rows
from drivetrain.trackers.secrets import Secrets

logger = get_logger(__name__)

QUEUE_LIMIT = 1000
"""Calls that may wait for a slow tracker; further ones are left out and counted."""

STATE_SECONDS = 10.0
"""How long a checkpoint waits for a tracker that is still being opened, or that is behind."""

OPEN_SECONDS = 60.0
"""How long a caller of `tracker` waits for the raw object."""

FINISH_SECONDS, INTERRUPTED_SECONDS, UPLOAD_SECONDS = 60.0, 30.0, 3600.0
"""How long the end of a run waits for what is not written yet: a completed one, another, one with files to upload."""


class BackgroundTracker(Tracker):
    """Calls another tracker on a thread of its own: every method returns at once.

    What that tracker raises becomes one warning for each cause; what it could not write, or was too slow for, is
    counted, and reported when the run ends. One that cannot be opened is not tried again before the next run. On other
    processes than the main one nothing happens.

    Args:
        inner: The tracker to call. Nothing else may call it.
        limit: Calls that may wait.
    """

    in_background = False  # it has its own thread

    def __init__(self, inner: Tracker, limit: int = QUEUE_LIMIT) -> None:
        self._inner = inner
        self._losses = Losses(type(inner).__name__ if type(self) is BackgroundTracker else type(self).__name__)
        self._calls = CallQueue(f"tracker-{self._losses.owner}", self._run, limit)
        self._is_open = self._was_used = self._has_files = self._is_behind = False
        self._refused = ""
        self._state: dict[str, Any] = {}
        self._secrets: Secrets | None = None

    @property
    def lost(self) -> int:
        """How many values could not be written."""
        return self._losses.total

    @property
    def secrets(self) -> Sequence[str]:
        return self._inner.secrets

    @property
    def log_dir(self) -> str | None:
        return self._inner.log_dir

    # calls

    def load(self) -> None:
        """Import what the tracker needs; an import that fails becomes a warning."""
        if _is_main():
            try:
                self._inner.load()
            except Exception as error:
                self._refuse(error)

    def start(self) -> None:
        """Let the thread open the run."""
        self._submit(lambda: None, 0)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the hyper-parameters of the run, without secrets."""
        kept = self._clean.hide(plain(hyperparameters_of(values)))
        self._submit(lambda: write_hyper_parameters(self._inner, kept), len(kept))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write values of one step.

        Args:
            values: Names and values.
            step: The optimizer step that the values belong to.
            **options: For the tracker's own `log`.
        """
        if not _is_main():
            return  # and no tensor is waited for
        kept = as_numbers(values, self._clean)
        self._submit(lambda: write_values(self._inner, kept, step, **options), len(kept))

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        kept = as_images(values)
        self._submit(lambda: self._inner.log_images(kept, step), len(kept))

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        titles, rows = as_rows(columns, data)
        kept = self._clean.hide(rows)
        self._submit(lambda: self._inner.log_table(name, titles, kept, step=step))

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        kept = self._clean.hide({key: str(text) for key, text in values.items()})
        self._submit(lambda: self._inner.log_text(kept, step), len(kept))

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        kept = {key: as_array(each).reshape(-1) for key, each in values.items()}
        self._submit(lambda: self._inner.log_histogram(kept, step), len(kept))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        if type(self._inner).log_graph is not Tracker.log_graph:
            text = str(model)
            self._submit(lambda: self._inner.log_graph(text))

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self._has_files = True
        given = os.path.abspath(path)
        self._submit(lambda: self._inner.log_artifact(given, name))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._submit(lambda: self._inner.after_save_checkpoint(checkpoint_callback))

    def save(self) -> None:
        """Let the thread bring everything to its place; does not wait for it."""
        if self._is_open:
            self._submit(self._inner.save, 0)

    @property
    def tracker(self) -> Any:
        """The raw object behind the tracker; opens the run and waits for it.

        Where the run could not be opened, and on other processes than the main one, an object that ignores every call.
        """
        if self._calls.is_current:
            return self._inner.tracker
        found: Any = self._ask(lambda: self._inner.tracker, OPEN_SECONDS)
        return Absent() if found is None else found

    # the state of the run

    def state_dict(self) -> dict[str, Any]:
        if type(self._inner).state_dict is Tracker.state_dict:
            return {}
        if self._is_behind and self._calls.pending:
            return self._state  # it was waited for once
        if not (self._was_used or self._is_open):
            return self._inner.state_dict()
        found = self._ask(self._inner.state_dict, STATE_SECONDS)
        self._is_behind = found is None
        if found is None:
            logger.warning_once(
                f"{self._losses.owner} had not opened or written its run {STATE_SECONDS:.0f} s after a checkpoint "
                "asked for its state: a run that resumes from there may begin a new one."
            )
        else:
            self._state = found
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._was_used and state and state != self._state:
            self.finalize()
        self._inner.load_state_dict(state)
        self._state = dict(state)

    # the end

    def finish(self) -> None:
        self.finalize()

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        """Record how the run ended, wait for what is not written yet, close the run and report what was lost.

        Args:
            status: How it ended.
            message: The first line of the error that ended it.
        """
        if not self._was_used:
            return
        self._was_used = False
        message = self._clean.in_text(message)
        seconds = INTERRUPTED_SECONDS if status not in (COMPLETED, "success") else FINISH_SECONDS
        seconds = UPLOAD_SECONDS if self._has_files else seconds
        self._calls.put(lambda: self._close(status, message), 0, always=True)
        in_time = self._calls.drain(seconds)
        left = self._calls.stop()
        if not in_time:
            self._losses.count_lost(
                left, f"It was not done {seconds:.0f} s after the end of the run.", " The script continues without it."
            )
        self._losses.report()
        self._has_files, self._is_behind, self._refused, self._secrets = False, False, "", None
        atexit.unregister(self._at_exit)

    def _close(self, status: str, message: str) -> None:
        if self._is_open:
            try:
                self._inner.finalize(status, message)
            finally:
                self._is_open = False

    def _at_exit(self) -> None:
        """Close a run that the script has left open."""
        self.finalize(*outcome_of(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)))

    # the thread

    @property
    def _clean(self) -> Secrets:
        if self._secrets is None:
            self._secrets = self._losses.secrets = Secrets(self._inner.secrets)
        return self._secrets

    def _submit(self, call: Callable[[], Any], values: int = 1) -> bool:
        if not _is_main():
            return False
        if not self._was_used:
            self._was_used = True
            atexit.register(self._at_exit)
        self._losses.count_given(values)
        taken = self._calls.put(call, values)
        if not taken:
            self._losses.count_lost(values, "It is slower than the run, and its queue is full.")
        return taken

    def _ask(self, call: Callable[[], Any], seconds: float) -> Any:
        """What a call returns; None if it raises, or is not made in time."""
        found: list[Any] = []
        done = threading.Event()

        def answer() -> None:
            try:
                found.append(call())
            finally:
                done.set()

        deadline = time.monotonic() + seconds
        if self._submit(answer, 0):
            while not (done.wait(0.02) or self._refused or time.monotonic() > deadline):
                pass
        return found[0] if found else None

    def _run(self, call: Callable[[], Any], values: int) -> None:
        try:
            if not self._open(values):
                return
            call()
        except BaseException as error:  # a package that exits must not end the thread, either
            self._losses.count_lost(values, error)

    def _open(self, values: int) -> bool:
        """Open the run unless it is open; returns whether it is."""
        if not self._is_open and not self._refused:
            try:
                self._inner.start()
            except BaseException as error:
                self._refuse(error, values)
                return False
            self._is_open = True
            # A package that closes its run when the interpreter ends does so after this: the last is called first.
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
        if self._refused:
            self._losses.count_lost(values, self._refused)
        return not self._refused

    def _refuse(self, error: BaseException, values: int = 0) -> None:
        text = str(error) if isinstance(error, TrackerError) else f"It cannot be started: {first_line(error)}."
        self._refused = text
        self._losses.count_lost(values, text, " The run continues without it.")


def as_numbers(values: Mapping[str, Any], secrets: Secrets | None = None) -> dict[str, Any]:
    """Return values with tensors and arrays of one element as numbers, and secrets in texts hidden."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "item") and getattr(value, "size", None) is not None:
            value = value.item() if _is_single(value) else value
        elif isinstance(value, str) and secrets is not None:
            value = secrets.in_text(value)
        found[name] = value
    return found


def _is_single(value: Any) -> bool:
    count = value.numel() if hasattr(value, "numel") else value.size
    return bool(count == 1)


def _is_main() -> bool:
    state = PartialState.existing()
    return state.is_main_process if state is not None else ProcessEnvironment.detect().rank == 0
