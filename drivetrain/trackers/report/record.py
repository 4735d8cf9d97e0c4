"""`run.json`: what a run is and how it stands, written beside its metrics while it runs."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.trackers.report.files import write_whole

NAME = "run.json"
PAGE = "report.html"
VERSION = 1

RUNNING, FINISHED, FAILED = "running", "finished", "failed"
INTERRUPTED, PREEMPTED = "interrupted", "preempted"
UNREADABLE = "unreadable"
STATES = (RUNNING, FINISHED, FAILED, INTERRUPTED, PREEMPTED)

_LATE_SECONDS = 600.0
"""How much later than announced a run on another machine may write before it counts as ended."""


def write_record(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write the record of a run into its folder.

    Args:
        folder: The run's folder.
        record: Names and values that JSON can hold; what it cannot hold becomes text.
    """
    text = json.dumps({"version": VERSION, **record}, ensure_ascii=False, default=str)
    write_whole(Path(folder, NAME), text)


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the record in a run's folder, with the state that the run is in now.

    Returns an empty dict if there is none. One that is damaged gives the state `"unreadable"` and the reason.

    Args:
        folder: The run's folder.
    """
    try:
        record = json.loads(Path(folder, NAME).read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        return _unreadable(f"it is no JSON ({type(error).__name__})")
    if not isinstance(record, dict):
        return _unreadable("it holds no names and values")
    wrong = [name for name, kind in _KINDS.items() if not isinstance(record.get(name), kind | None)]
    if not wrong:
        wrong = [f"metrics.{name}" for name, value in record.get("metrics", {}).items() if not _is_number(value)]
        spans = [
            each if isinstance(each, dict) else {"started": None} for each in (*record.get("sessions", ()), record)
        ]
        wrong += [name for each in spans for name in _TIMES if not _is_time(each.get(name, 0))]
    if wrong:
        return _unreadable(f"{wrong[0]!r} is of another type than runs write")
    return with_present_state(record)


# The types of the parts that are looked into.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("best", "metrics", "progress", "hyper_parameters", "trainer", "model", "data"), dict),
    **dict.fromkeys(("environment", "process", "commit"), dict),
    **dict.fromkeys(("sessions", "warnings", "argv"), list),
    **dict.fromkeys(("state", "reason", "command", "cwd", "traceback", "resume"), str),
}
_TIMES = ("started", "updated", "due")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | None)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1e12


def _unreadable(reason: str) -> dict[str, Any]:
    return {"state": UNREADABLE, "reason": f"{NAME} cannot be read: {reason}"}


def with_present_state(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose state is that of a run which ended without recording it, where its process is gone.

    Args:
        record: As `write_record` was given it.
    """
    if record.get("state") != RUNNING or _is_alive(record):
        return record
    return {
        **record,
        "state": FAILED,
        "reason": "its process ended without recording why, as a process does that is killed",
    }


def seconds_of(record: Mapping[str, Any]) -> float:
    """How long a run has taken, without the time between its parts where it was resumed."""
    spans = [*record.get("sessions", ()), record]
    return sum(float(each.get("updated", 0)) - float(each.get("started", 0)) for each in spans)


def _is_alive(record: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a record still runs; on another machine, whether it writes as announced."""
    process = record.get("process")
    process = process if isinstance(process, dict) else {}
    if process.get("host") != platform.node():
        return time.time() < float(record.get("due", 0)) + _LATE_SECONDS
    from drivetrain.runtime.own_process import boot_id, is_alive

    if process.get("boot") and process["boot"] != boot_id():
        return False
    since_boot = process.get("since_boot")
    try:
        started = float(process.get("started", 0) if since_boot is None else since_boot)
        return is_alive(int(process.get("id", -1)), started)
    except (ValueError, TypeError, OverflowError):
        return False
