"""Writes the record and the page of a run while it runs, seldom enough to cost nothing."""

from __future__ import annotations

import os
import shlex
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.support.run_facts import facts_of, is_changed
from drivetrain.runtime.terminal import without_credentials
from drivetrain.trackers.losses import first_line
from drivetrain.trackers.report.page import write_page
from drivetrain.trackers.report.record import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    PREEMPTED,
    RUNNING,
    read_record,
    write_record,
)

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

_STATES = {"failed": FAILED, "interrupted": INTERRUPTED, "preempted": PREEMPTED}
_SHARE = 8e-4
"""The part of the time that pages may take; samples take two ten-thousandths."""
_FIRST_SECONDS = 15.0
"""So that a first page and a last one, 8 ms of processor time, are within the share of every run that has both."""
_MOST_LINES = 60
"""Of a traceback, from its end."""


class ReportWriter:
    """Writes `run.json` and `report.html`.

    Args:
        trainer: The trainer.
        task: The task.
        folder: The run's folder.
        seconds: The time between two pages at least.
        warnings: Time, step, text and count of the warnings so far; the list grows.
    """

    def __init__(
        self, trainer: Trainer, task: Task, folder: str, seconds: float, warnings: Sequence[Sequence[Any]]
    ) -> None:
        self._trainer, self._task, self._folder = trainer, task, folder
        self._seconds, self._warnings = seconds, warnings
        self._started = time.time()
        self._begun = time.monotonic()
        self._due = self._begun + _FIRST_SECONDS
        self._spent = 0.0
        self._error = self._traceback = ""
        self._facts: dict[str, Any] | None = None
        self._has_page = False
        before = read_record(folder)
        self._sessions, self._before = _sessions_before(before), before.get("warnings", [])

    @property
    def due_in(self) -> float:
        """The seconds until it is time for a page; 0 or less where it is."""
        return self._due - time.monotonic()

    def write(self) -> None:
        """Write the record and the page of a run that runs; the first page has no curves yet."""
        is_first, self._has_page = not self._has_page, True
        began = time.thread_time()
        self._due = time.monotonic() + self._seconds  # also where this attempt fails
        record = self._record(RUNNING, "")
        waited = 0.0 if is_first else self._ask_for_changes(record)
        write_record(self._folder, record)
        write_page(self._folder, record, with_values=not is_first)
        cost = time.thread_time() - began + waited
        self._spent += cost
        # The next page costs about as much as this one.
        self._due = max(time.monotonic() + self._seconds, self._begun + (self._spent + cost) / _SHARE)

    def write_beginning(self) -> None:
        """Write the record alone, so that a run is known whose processes are killed before its first page."""
        write_record(self._folder, self._record(RUNNING, ""))
        self._facts = None  # the validation data are known only later

    @staticmethod
    def _ask_for_changes(record: dict[str, Any]) -> float:
        """Ask git, once, whether files differ from the commit; returns the seconds that this took."""
        commit = record.get("commit")
        if commit is None or commit["changed"] is not None:
            return 0.0
        began = time.monotonic()
        commit["changed"] = is_changed(record["cwd"])
        return time.monotonic() - began

    @property
    def has_error(self) -> bool:
        """Whether an exception has ended the run."""
        return bool(self._error)

    def record_error(self, error: BaseException) -> None:
        """Keep what ended the run, for the last page.

        Args:
            error: The exception.
        """
        self._error = first_line(error)
        lines = "".join(traceback.format_exception(error)).splitlines()
        self._traceback = "\n".join(lines[-_MOST_LINES:])

    def finish(self) -> None:
        """Write them for the last time."""
        reason = self._trainer.stop_reason
        state = FINISHED if reason is None else _STATES.get(str(reason), FINISHED)
        has_failed = state == FAILED and bool(self._error)
        record = self._record(state, self._error if has_failed else self._trainer.control.details)
        if has_failed:
            record["traceback"] = self._trainer.tracker_group.secrets.in_text(self._traceback)
        write_record(self._folder, record)
        write_page(self._folder, record)

    def _record(self, state: str, reason: str) -> dict[str, Any]:
        if self._facts is None:
            self._facts = facts_of(self._trainer, self._task)
        trainer, now = self._trainer, time.time()
        secrets = trainer.tracker_group.secrets
        record = {
            **self._facts,
            "state": state,
            "reason": secrets.in_text(reason),
            "started": self._started,
            "updated": now,
            "due": now + max(self._seconds, self._due - time.monotonic()),
            "data_shards": trainer.strategy.topology.data_shard.count,
            "progress": {"step": trainer.global_step, "epoch": trainer.current_epoch},
            "best": self._best(),
            "metrics": dict(list(trainer.tracker_log.written.items())[:100]),
            "warnings": [list(each) for each in (*self._before, *self._warnings)],
            "sessions": self._sessions,
        }
        if record["argv"] is not None and record["best"].get("newest"):
            place = os.path.relpath(self._folder, record["cwd"])
            record["resume"] = shlex.join(["drivetrain", "runs", "resume", place])
        return record

    def _best(self) -> dict[str, Any]:
        """The best checkpoint and the newest."""
        found: dict[str, Any] = {"task": type(self._task).__name__, "module": type(self._task).__module__}
        for callback in self._trainer.checkpoint_callbacks[:1]:
            score = callback.best_model_score
            found |= {
                "monitor": callback.monitor,
                "mode": callback.mode,
                "value": None if score is None else float(score),
                "path": without_credentials(callback.best_model_path),
                "newest": without_credentials(callback.newest_model_path),
            }
        return found


def _sessions_before(before: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of the run before this one, where it was resumed in the same folder."""
    if not before.get("started"):
        return []
    part = {name: before.get(name) for name in ("started", "updated", "state", "reason")}
    return [*before.get("sessions", ()), part]
