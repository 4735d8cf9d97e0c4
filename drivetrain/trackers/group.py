"""Groups of trackers, and trackers that run on background threads."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, TrackerError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState
from drivetrain.trackers.base import (
    COMPLETED,
    STATUS_WORDS,
    Losses,
    Tracker,
    as_array,
    as_images,
    as_rows,
    first_line,
    hyperparameters_of,
    outcome_of,
    plain,
    write_hyper_parameters,
    write_values,
)
from drivetrain.trackers.directory import DirectoryTracker
from drivetrain.trackers.secrets import Secrets

# Queue of calls


Call = Callable[[], Any]
Item = tuple[Call, int]


class CallQueue:
    """Bounded queue of function calls, executed by a background thread."""

    def __init__(self, name: str, run: Callable[[Call, int], None], limit: int) -> None:
        self._name, self._run, self._limit = name, run, limit
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._generation = 0
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        return self._pending

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def put(self, call: Call, values: int = 1, *, always: bool = False) -> bool:
        with self._changed:
            if self._pending >= self._limit and not always:
                # The queue is full.
                return False
            self._pending += 1
            # A forked process inherits the queue, but not its thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, args=(self._items, self._generation), name=self._name, daemon=True
                )
                self._thread.start()
        self._items.put((call, values))
        return True

    def drain(self, timeout: float) -> bool:
        """Wait until all queued calls have been executed. Return False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def stop(self) -> int:
        with self._changed:
            # A call that hangs keeps the old queue and its thread. New calls get a new queue, so they are not
            # blocked.
            items, self._items = self._items, queue.SimpleQueue()
            idle = self._thread if self._pending == 0 else None
            self._generation += 1
            self._pending, self._thread = 0, None
        waiting = 0
        while True:
            try:
                item = items.get_nowait()
            except queue.Empty:
                break
            waiting += item[1] if item is not None else 0
        items.put(None)
        if idle is not None and not self.is_current:
            idle.join(1.0)
        return waiting

    def _work(self, items: queue.SimpleQueue[Item | None], generation: int) -> None:
        while (item := items.get()) is not None:
            self._run(*item)
            del item  # free the values before waiting for the next call
            with self._changed:
                # A thread that finishes after `stop` must not change the count of its successor.
                if generation == self._generation:
                    self._pending -= 1
                    self._changed.notify_all()


# Objects in place of a tracker, on other processes and in trial runs


class Absent:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<no tracker here>"


class AbsentTracker(Tracker):
    """Tracker that ignores every call, for processes that must not log."""

    def __init__(self, name: str = "absent") -> None:
        self.name = name  # type: ignore[misc]

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        pass

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        pass

    def _leave_out(self, what: str) -> None:
        pass

    @property
    def tracker(self) -> Any:
        return Absent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()


# Background threads


logger = get_logger(__name__)

QUEUE_LIMIT = 1000
"""The maximum number of calls that wait for a slow tracker. Further calls are dropped and counted."""

STATE_SECONDS = 10.0
"""The seconds that a checkpoint waits for a tracker that is still opening its run or is behind."""

OPEN_SECONDS = 60.0
"""The seconds that a caller of `tracker` waits for the underlying object."""

FINISH_SECONDS, INTERRUPTED_SECONDS, UPLOAD_SECONDS = 60.0, 30.0, 3600.0
"""The seconds that a run's end waits for unwritten values: after completion, an interrupt, and with uploads."""


class BackgroundTracker(Tracker):
    """Tracker that passes each call to another tracker on a background thread, so that logging never delays training.

    Each kind of error of the other tracker logs one warning. Values that could not be written are counted and reported
    when the run ends. If the run cannot be opened, the tracker is disabled until the next run. Only the main process
    calls the other tracker.

    Args:
        inner: The tracker to call. No other code may call it.
        limit: The maximum number of waiting calls.
    """

    in_background = False  # has its own thread already

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
        return self._losses.total

    @property
    def secrets(self) -> Sequence[str]:
        return self._inner.secrets

    @property
    def log_dir(self) -> str | None:
        return self._inner.log_dir

    # calls

    def load(self) -> None:
        if _is_main():
            try:
                self._inner.load()
            except Exception as error:
                self._refuse(error)

    def start(self) -> None:
        self._submit(lambda: None, 0)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        kept = self._clean.hide(plain(hyperparameters_of(values)))
        self._submit(lambda: write_hyper_parameters(self._inner, kept), len(kept))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        if not _is_main():
            return  # return before tensors are read from the device
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
            # The thread must not access the module while it is trained.
            text = str(model)
            self._submit(lambda: self._inner.log_graph(text))

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self._has_files = True
        # The working directory may have changed when the thread uses the path.
        given = os.path.abspath(path)
        self._submit(lambda: self._inner.log_artifact(given, name))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._submit(lambda: self._inner.after_save_checkpoint(checkpoint_callback))

    def save(self) -> None:
        if self._is_open:
            self._submit(self._inner.save, 0)

    @property
    def tracker(self) -> Any:
        """The run object of the wrapped tracker's library.

        Opens the run if necessary and waits until it is open. If the run cannot be opened, and on other processes than
        the main one, this is an object that ignores every call.
        """
        if self._calls.is_current:
            return self._inner.tracker
        found: Any = self._call_and_wait(lambda: self._inner.tracker, OPEN_SECONDS)
        return Absent() if found is None else found

    # state

    def state_dict(self) -> dict[str, Any]:
        if type(self._inner).state_dict is Tracker.state_dict:
            return {}
        if self._is_behind and self._calls.pending:
            return self._state  # an earlier checkpoint has waited already
        # The thread does not use the tracker yet, so it can be called directly.
        if not (self._was_used or self._is_open):
            return self._inner.state_dict()
        found = self._call_and_wait(self._inner.state_dict, STATE_SECONDS)
        self._is_behind = found is None
        if found is None:
            logger.warning_once(
                f"{self._losses.owner} did not return its state for a checkpoint within {STATE_SECONDS:.0f} s. A "
                "run that resumes from this checkpoint may start a new tracker run."
            )
        else:
            self._state = found
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # An open run must be closed before the tracker continues another one.
        if self._was_used and state and state != self._state:
            self.finalize()
        self._inner.load_state_dict(state)
        self._state = dict(state)

    # end of the run

    def finish(self) -> None:
        self.finalize()

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        if not self._was_used:
            return
        self._was_used = False
        message = self._clean.in_text(message)
        seconds = INTERRUPTED_SECONDS if status not in (COMPLETED, "success") else FINISH_SECONDS
        seconds = UPLOAD_SECONDS if self._has_files else seconds
        # The run must be closed even if the queue is full.
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
        # In an interactive session, `last_value` is the error of any earlier statement, not of this run.
        self.finalize(*outcome_of(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)))

    # background thread

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
            self._losses.count_lost(values, "It is slower than the run, so its queue is full.")
        return taken

    def _call_and_wait(self, call: Callable[[], Any], seconds: float) -> Any:
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
        except BaseException as error:  # SystemExit of a package must not end the thread
            self._losses.count_lost(values, error)

    def _open(self, values: int) -> bool:
        if not self._is_open and not self._refused:
            try:
                self._inner.start()
            except BaseException as error:
                self._refuse(error, values)
                return False
            self._is_open = True
            # Exit handlers run in reverse order: register after the package's own handler, to run before it.
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


ALIASES = {"comet_ml": "comet"}
"""Aliases of tracker names."""
_RECORDED = "recorded"  # key of the recorder's state in a checkpoint


@dataclass(eq=False)
class TrackerGroup:
    """All experiment trackers of one run, called together.

    Each kind of error of a tracker logs one warning. Values that it could not write are counted and reported at the
    end. Secrets are removed from hyper-parameters.

    Attributes:
        trackers: The trackers. The list may grow.
        is_main: True on the main process.
        recorder: A further tracker that stores values for the run report if none of the others writes files, or None.
    """

    trackers: list[Tracker]
    is_main: bool
    recorder: Tracker | None = field(default=None, init=False)
    _targets: dict[int, tuple[Tracker, Tracker, Losses]] = field(default_factory=dict, init=False)
    _clean: Secrets | None = field(default=None, init=False)

    @property
    def writes_here(self) -> bool:
        """True if at least one tracker logs on this process."""
        return any(self._is_called(tracker) for tracker in self._writers)

    @property
    def keeps_values(self) -> bool:
        return bool(self.trackers) or self.recorder is not None

    @property
    def _writers(self) -> list[Tracker]:
        return self.trackers if self.recorder is None else [*self.trackers, self.recorder]

    def record_with(self, recorder: Tracker | None) -> None:
        self.recorder = recorder

    @property
    def secrets(self) -> Secrets:
        if self._clean is None:
            self._clean = Secrets(each for tracker in self.trackers for each in tracker.secrets)
        return self._clean

    # start of the run

    def start(self) -> None:
        self._clean = None
        self._each(lambda target: target.load())
        self._each(lambda target: target.start() if isinstance(target, BackgroundTracker) else None)

    def share_directories(self) -> None:
        held = [each.run_directory for each in self._writers if isinstance(each, DirectoryTracker)]
        # All processes use the run directories of the main process.
        [versions] = broadcast_object_list([[each.version for each in held] if self.is_main else None])
        for directory, version in zip(held, versions, strict=False):
            directory.version = version

    def open(self) -> None:
        self._clean = None
        self._each(lambda target: target.load())
        self._each(lambda target: target.start())

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        if self.writes_here:
            shown = self.secrets.hide(dict(values))
            self._each(lambda target: write_hyper_parameters(target, shown), len(shown))

    def log_graph(self, model: Any) -> None:
        self._each_given(lambda target: target.log_graph(model))

    # during the run

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log the values of one optimizer step with every tracker of this group.

        `options` is a dict from tracker name to arguments of its `log`.
        """
        if not self.writes_here:
            return
        kept = as_numbers(values, self.secrets)
        by_name = {ALIASES.get(name, name): given for name, given in (options or {}).items()}
        for tracker in self._writers:
            given = by_name.get(tracker.name, {})
            self._call(tracker, partial(_log, values=kept, step=step, options=given), len(kept))

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self._each(lambda target: target.log_images(values, step), len(values))

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self._each_given(lambda target: target.log_histogram(values, step), len(values))

    def log_table(self, name: str, columns: Sequence[str] | None, data: Any, step: int | None = None) -> None:
        if self.writes_here:
            titles, rows = as_rows(columns, data)
            kept = self.secrets.hide(rows)
            self._each(lambda target: target.log_table(name, titles, kept, step=step), 1)

    def save(self) -> None:
        self._each(lambda target: target.save())

    def checkpoint_saved(self, callback: Any) -> None:
        """Tell every tracker that a `ModelCheckpoint` has saved a checkpoint."""
        for tracker in self.trackers:
            if type(tracker).after_save_checkpoint is not Tracker.after_save_checkpoint:
                self._call(tracker, lambda target: target.after_save_checkpoint(callback))

    # end of the run

    def log_best_model(self, path: str | os.PathLike[str]) -> None:
        """Upload the best checkpoint with the trackers whose `log_model` is True."""
        for tracker in self.trackers:
            if tracker.log_model:
                self._call(tracker, lambda target: target.log_artifact(path, "best"))

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        text = self.secrets.in_text(message) if message else ""
        self._each(lambda target: target.record_end(STATUS_WORDS.get(status, status), text))
        for _, _, losses in self._targets.values():
            losses.report()

    # state

    def state(self) -> list[dict[str, Any]]:
        """Return the state dicts of all trackers for a checkpoint."""
        if not self.is_main:
            return []
        states: list[dict[str, Any]] = []
        for tracker in self.trackers:
            states.append({})
            # If a tracker fails, its state stays empty, so that states and trackers remain aligned.
            self._call(tracker, lambda target: states[-1].update(target.state_dict()), 0)
        if self.recorder is not None:
            recorded: dict[str, Any] = {}
            self._call(self.recorder, lambda target: recorded.update(target.state_dict()), 0)
            states.append({_RECORDED: recorded})
        return states

    def load_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        if self.is_main:
            # States are matched by position. A resumed run may have more or fewer trackers.
            given = [state for state in states if _RECORDED not in state]
            for tracker, state in zip(self.trackers, given, strict=False):
                self._call(tracker, partial(_load, state=state))
            recorded = next((state[_RECORDED] for state in states if _RECORDED in state), None)
            if self.recorder is not None and isinstance(recorded, Mapping):
                self._call(self.recorder, partial(_load, state=recorded))

    # single trackers

    def get(self, name: str) -> Tracker:
        """Return the run's tracker with this name.

        On processes that do not log, its methods do nothing.

        Raise `ConfigurationError` if the run has no tracker with this name.
        """
        wanted = ALIASES.get(name, name)
        for tracker in self.trackers:
            if tracker.name == wanted:
                return tracker if self._is_called(tracker) else AbsentTracker(wanted)
        known = ", ".join(repr(tracker.name) for tracker in self.trackers) or "none"
        raise ConfigurationError(f"There is no tracker {name!r} in this run. Its trackers: {known}.")

    def _is_called(self, tracker: Tracker) -> bool:
        return self.is_main or not tracker.main_process_only

    def _each(self, call: Callable[[Tracker], Any], values: int = 0) -> None:
        for tracker in self._writers:
            self._call(tracker, call, values)

    def _each_given(self, call: Callable[[Tracker], Any], values: int = 0) -> None:
        for tracker in self.trackers:
            self._call(tracker, call, values)

    def _call(self, tracker: Tracker, call: Callable[[Tracker], Any], values: int = 0) -> None:
        if not self._is_called(tracker):
            return
        target, losses = self._target(tracker)
        losses.count_given(values)
        try:
            call(target)
        # A tracker must not end the run, except for an invalid checkpoint, which the user must know of.
        except CheckpointError:
            raise
        except Exception as error:
            losses.secrets = self.secrets
            losses.count_lost(values, error)

    def _target(self, tracker: Tracker) -> tuple[Tracker, Losses]:
        known = self._targets.get(id(tracker))
        if known is None:
            # A tracker that every process calls may use collectives, so it must stay on the main thread.
            is_separate = tracker.in_background and tracker.main_process_only
            target = BackgroundTracker(tracker) if is_separate else tracker
            known = self._targets[id(tracker)] = (tracker, target, Losses(type(tracker).__name__))
        return known[1], known[2]


def _log(target: Any, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
    write_values(target, dict(values), step, **options)


def _load(target: Tracker, state: Mapping[str, Any]) -> None:
    target.load_state_dict(state)
