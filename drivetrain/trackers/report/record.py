"""`run.json`: what a run is and how it stands, written beside its metrics while it runs."""

from __future__ import annotations

import json
import os
import platform
import stat
import time
from collections.abc import Iterator, Mapping
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
    path = Path(folder, NAME)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return _unreadable("it is no file of a size that runs write")
        record = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        return _unreadable(f"it is no JSON ({type(error).__name__})")
    if not isinstance(record, dict):
        return _unreadable("it holds no names and values")
    wrong = next(_wrong_entries(record), None)
    if wrong is not None:
        return _unreadable(f"{wrong!r} is of another type than runs write")
    return with_present_state(record)


def _integer(text: str) -> int:
    """Return a whole number that a float can hold. Raises ValueError of a longer one."""
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _wrong_entries(record: Mapping[str, Any]) -> Iterator[str]:
    """Find the entries that are of another type than a run writes them in."""
    kinds = _KINDS | dict.fromkeys(_TIMES, float)
    for name, kind in kinds.items():
        if not _is_a(record.get(name), kind):
            yield name
            return  # the others look into it
    for part, entries in _ENTRIES.items():
        found = record.get(part) or {}
        yield from (f"{part}.{name}" for name, kind in entries.items() if not _is_a(found.get(name), kind))
    yield from (f"metrics.{name}" for name, value in (record.get("metrics") or {}).items() if not _is_a(value, float))
    for each in record.get("sessions") or ():
        if not (isinstance(each, dict) and all(_is_a(each.get(name), float) for name in _TIMES)):
            yield "sessions"
    for each in record.get("warnings") or ():
        kinds_of_warning = (float, float, str, float)
        if not (isinstance(each, list) and len(each) == len(kinds_of_warning)) or not all(
            value is not None and _is_a(value, kind) for value, kind in zip(each, kinds_of_warning, strict=True)
        ):
            yield "warnings"
    if not all(isinstance(word, str) for word in record.get("argv") or ()):
        yield "argv"
    spans = [record, *(record.get("sessions") or ())]
    yield from (name for each in spans for name in _TIMES if not 0 <= (each.get(name) or 0) <= _LATEST)


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value is of a type, or None; a float may be a whole number."""
    if value is None:
        return True
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


# The types of the parts that are looked into.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("best", "metrics", "progress", "hyper_parameters", "trainer", "model", "data"), dict),
    **dict.fromkeys(("environment", "process", "commit"), dict),
    **dict.fromkeys(("sessions", "warnings", "argv"), list),
    "data_shards": float,
    **dict.fromkeys(("state", "reason", "command", "cwd", "traceback", "resume"), str),
}
_TIMES = ("started", "updated", "due")
_ENTRIES: dict[str, dict[str, type]] = {
    "best": {**dict.fromkeys(("monitor", "mode", "path", "newest", "task", "module"), str), "value": float},
    "progress": {"step": float, "epoch": float},
    "commit": {"id": str, "branch": str, "changed": bool},
    "process": {"host": str, "id": int, "started": float, "since_boot": float, "boot": str},
}
_LATEST = 1e12
"""Seconds since 1970 that no clock shows."""
_MOST_DIGITS = 300
_LARGEST = 64 * 2**20
"""Bytes of a file; the longest that runs write have some hundred thousand."""


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
