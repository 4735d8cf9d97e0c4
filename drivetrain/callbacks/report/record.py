"""Record of a run, `run.json`, and the values that its trackers have written."""

from __future__ import annotations

import csv
import json
import math
import operator
import os
import platform
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from drivetrain.runtime.environment import COMMAND_VARIABLE, RESUME_VARIABLE
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import HIDDEN, shown

# Atomic writes


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically, so that readers never see a part of it."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        os.replace(beside, target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


NAME = "run.json"
PAGE = "report.html"
OUTPUT = "output.log"
"""File of the lines that a run has logged and printed."""
VERSION = 2

RUNNING, FINISHED, FAILED = "running", "finished", "failed"
INTERRUPTED, PREEMPTED = "interrupted", "preempted"
UNREADABLE = "unreadable"

_LATE_SECONDS = 600.0
"""The delay in seconds after which a run on another machine counts as ended, if it has not updated its record."""


def write_record(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    text = json.dumps({"version": VERSION, **record}, ensure_ascii=False, default=str)
    write_whole(Path(folder, NAME), text)


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a run's `run.json` as a dict, and mark the run as failed if its process has died.

    Return an empty dict if there is no record. For a damaged record, return the state `"unreadable"` and the reason.
    """
    path = Path(folder, NAME)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return _unreadable("it is not a regular file, or it is too large")
        record = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        return _unreadable(f"it is not valid JSON ({type(error).__name__})")
    if not isinstance(record, dict):
        return _unreadable("it is not a JSON object")
    wrong = next(_wrong_entries(record), None)
    if wrong is not None:
        return _unreadable(f"{wrong!r} has an unexpected type")
    return with_present_state(record)


def _integer(text: str) -> int:
    # A longer integer could not be converted to a float and would fail later.
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _wrong_entries(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the entries in a run's record that have a wrong type."""
    kinds = _KINDS | dict.fromkeys(_TIMES, float)
    for name, kind in kinds.items():
        if not _is_a(record.get(name), kind):
            yield name
            return  # the checks below need the right types here
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
    if not all(isinstance(each, dict) for each in record.get("optimizers") or ()):
        yield "optimizers"
    if not all(isinstance(word, str) for word in record.get("argv") or ()):
        yield "argv"
    spans = [record, *(record.get("sessions") or ())]
    yield from (name for each in spans for name in _TIMES if not 0 <= (each.get(name) or 0) <= _LATEST)


def _is_a(value: Any, kind: type) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


# Expected types of the entries that are read.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("best", "metrics", "progress", "hyper_parameters", "trainer", "model", "data"), dict),
    **dict.fromkeys(("environment", "process", "commit"), dict),
    **dict.fromkeys(("sessions", "warnings", "argv", "optimizers"), list),
    "data_shards": float,
    **dict.fromkeys(("name", "state", "reason", "command", "cwd", "traceback", "failed_at", "resume"), str),
}
_TIMES = ("started", "updated", "due")
_ENTRIES: dict[str, dict[str, type]] = {
    "best": {**dict.fromkeys(("monitor", "mode", "path", "newest", "task", "module"), str), "value": float},
    "progress": {"step": float, "epoch": float},
    "commit": {"id": str, "branch": str, "changed": bool},
    "process": {"host": str, "id": int, "started": float, "since_boot": float, "boot": str},
}
_LATEST = 1e12
"""An upper bound for times, in seconds since 1970."""
_MOST_DIGITS = 300
_MOST_OUTPUT = 64 * 2**10
"""The number of bytes of `output.log` that a page shows, counted from the end."""
_LARGEST = 64 * 2**20
"""The maximum size of a record in bytes. Real records have at most some hundred thousand."""


def _unreadable(reason: str) -> dict[str, Any]:
    return {"state": UNREADABLE, "reason": f"{NAME} cannot be read: {reason}"}


def with_present_state(record: dict[str, Any]) -> dict[str, Any]:
    if record.get("state") != RUNNING or _is_alive(record):
        return record
    return {
        **record,
        "state": FAILED,
        "reason": "its process ended without recording a reason, so it was probably killed",
    }


def read_output(folder: Path) -> str:
    try:
        with open(folder / OUTPUT, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_OUTPUT))
            is_whole, text = file.tell() == 0, file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text if is_whole else text.partition("\n")[2]


def seconds_of(record: Mapping[str, Any]) -> float:
    spans = [*record.get("sessions", ()), record]
    return sum(float(each.get("updated", 0)) - float(each.get("started", 0)) for each in spans)


def _is_alive(record: Mapping[str, Any]) -> bool:
    """Return True if the process of a run seems to be alive."""
    process = record.get("process")
    process = process if isinstance(process, dict) else {}
    if process.get("host") != platform.node():
        return time.time() < float(record.get("due", 0)) + _LATE_SECONDS
    from drivetrain.checkpoint.storage import boot_id, is_alive

    # After a reboot, another process may have the same ID.
    if process.get("boot") and process["boot"] != boot_id():
        return False
    since_boot = process.get("since_boot")
    try:
        started = float(process.get("started", 0) if since_boot is None else since_boot)
        return is_alive(int(process.get("id", -1)), started)
    except (ValueError, TypeError, OverflowError):
        return False


# Logged values


TABLE = "metrics.csv"
EVENTS = "*tfevents*"

_STEPS = ("step", "global_step", "_step", "steps", "iteration")
_NOT_VALUES = {*_STEPS, "epoch", "time", "wall_time", "_timestamp", "_runtime", "created_at"}
_MOST_EVENT_IMAGES = 12
_MOST_POINTS = 1500
"""The number of points above which a curve is reduced to the extremes of each stretch."""


@dataclass
class Curve:
    """Logged values of one metric, in order of their steps.

    Attributes:
        steps: The step of each value.
        values: The values, which may be NaN or infinite.
    """

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        return self.values[-1]

    def best(self, highest: bool) -> tuple[float, float]:
        pairs = [(value, step) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]
        if not pairs:
            return math.nan, math.nan
        value = (max if highest else min)(value for value, _ in pairs)
        return value, next(step for each, step in pairs if each == value)

    def thinned(self, most: int = _MOST_POINTS) -> Curve:
        if len(self) <= most:
            return self
        width = len(self) / (most // 2)
        # The first and last points stay, so that the curve keeps its range.
        kept = {0, len(self) - 1}
        for part in range(most // 2):
            first = int(part * width)
            stretch = self.values[first : int((part + 1) * width)]
            # the extremes of each stretch
            kept |= {first + stretch.index(min(stretch)), first + stretch.index(max(stretch))}
        indices = sorted(kept)
        return Curve([self.steps[index] for index in indices], [self.values[index] for index in indices])


@dataclass
class RunValues:
    """All metric values that were logged in one run, with one curve for each metric.

    Attributes:
        curves: A dict from metric name to curve, in the order of first appearance.
        epochs: A dict from step to epoch, for steps with a known epoch.
        images: Image files by name and step, if the values come from TensorBoard's event files.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    epochs: dict[float, float] = field(default_factory=dict)
    images: dict[str, dict[float, list[bytes]]] = field(default_factory=dict)

    def add(self, name: str, step: float, value: float) -> None:
        curve = self.curves.setdefault(name, Curve())
        if curve.steps and curve.steps[-1] == step:
            curve.values[-1] = value
        else:
            curve.steps.append(step)
            curve.values.append(value)

    def put_in_order(self) -> RunValues:
        for curve in self.curves.values():
            if any(map(operator.ge, curve.steps, curve.steps[1:])):
                pairs = sorted(dict(zip(curve.steps, curve.values, strict=True)).items())
                curve.steps, curve.values = [step for step, _ in pairs], [value for _, value in pairs]
        return self


def read_values(place: str | os.PathLike[str]) -> RunValues:
    """Read a run's logged values from its CSV table or TensorBoard files."""
    path = Path(place)
    if path.is_file():
        return read_table(path) if "tfevents" not in path.name else read_events(path)
    if (path / TABLE).is_file():
        return read_table(path / TABLE)
    if any(path.glob(EVENTS)):
        return read_events(path)
    tables = sorted(path.glob("*.csv"))
    if len(tables) == 1:
        return read_table(tables[0])
    raise ConfigurationError(
        f"{os.fspath(place)!r} contains no metrics of a run. Pass a run's directory with a {TABLE} or TensorBoard "
        "event files, or one such file.",
    )


def has_values(folder: str | os.PathLike[str]) -> bool:
    path = Path(folder)
    return (path / TABLE).is_file() or any(path.glob(EVENTS))


def read_table(path: str | os.PathLike[str]) -> RunValues:
    """Read logged values from a CSV table with one row per step.

    The step is the column `step`, or else the row number. Cells that are not numbers are ignored.
    """
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        columns = list(zip_longest(*rows, fillvalue=""))  # parsing by column is faster than by row
    cells = dict(zip(header, columns, strict=False))
    named = next((name for name in _STEPS if name in cells), None)
    count = len(columns[0]) if columns else 0
    steps: list[float | None] = [float(row) for row in range(count)] if named is None else _numbers(cells[named])
    found, first = RunValues(), {}
    if "epoch" in cells:
        epochs = _curve(steps, _numbers(cells["epoch"]))
        for step, epoch in zip(epochs.steps, epochs.values, strict=True):
            found.epochs.setdefault(step, epoch)
    for name in cells.keys() - _NOT_VALUES - {""}:
        curve = _curve(steps, _numbers(cells[name]))
        if len(curve):
            found.curves[name] = curve
            first[name] = next(row for row, cell in enumerate(cells[name]) if cell)
    names = sorted(found.curves, key=lambda name: (first[name], header.index(name)))
    found.curves = {name: found.curves[name] for name in names}
    return found.put_in_order()


def _curve(steps: Sequence[float | None], values: Sequence[float | None]) -> Curve:
    pairs = zip(steps, values, strict=True)
    kept = [(step, value) for step, value in pairs if step is not None and value is not None]
    return Curve([step for step, _ in kept], [value for _, value in kept])


def _numbers(cells: Sequence[str]) -> list[float | None]:
    try:
        # Most columns hold only numbers: convert them at once, and each cell alone only if that fails.
        return [float(cell) if cell else None for cell in cells]
    except ValueError:
        return [_number(cell) for cell in cells]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def read_events(place: str | os.PathLike[str]) -> RunValues:
    try:
        from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, EventAccumulator
    except ImportError as error:
        raise ConfigurationError(
            f"{os.fspath(place)!r} holds TensorBoard event files, but TensorBoard is not installed. Install it with "
            '`pip install "drivetrain[tensorboard]"`.',
        ) from error
    # The size 0 keeps all values. By default, TensorBoard keeps a sample.
    events = EventAccumulator(os.fspath(place), size_guidance={SCALARS: 0, IMAGES: _MOST_EVENT_IMAGES})
    events.Reload()
    found = RunValues()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            if name == "epoch":
                found.epochs.setdefault(float(event.step), event.value)
            elif name not in _NOT_VALUES:
                found.add(name, float(event.step), event.value)
    for tag in events.Tags()["images"]:
        # Several images of one name have the tags `name/0`, `name/1` and so on.
        name = re.sub(r"/\d+$", "", tag)
        for image in events.Images(tag):
            found.images.setdefault(name, {}).setdefault(float(image.step), []).append(image.encoded_image_string)
    return found.put_in_order()


# Text formats


def number(value: Any) -> str:
    """Format a number with about five significant digits. None and NaN become `-`."""
    if not isinstance(value, int | float | None):
        return str(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.5g}"


def duration(seconds: float) -> str:
    """Format a number of seconds in readable units, such as `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def plain_text(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_text, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain_text(each)}" for name, each in value.items()) or "none"
    return "-" if value is None else str(value)


SETTINGS = {
    "hyper_parameters": "Hyper-parameters",
    "trainer": "Trainer",
    "optimizers": "Optimizer",
    "model": "Model",
    "data": "Data",
    "environment": "Environment",
}
"""Parts of a run's record that describe its settings, with their headings."""


def settings_of(record: Mapping[str, Any], *parts: str) -> dict[str, dict[str, str]]:
    found = {}
    for part in parts or SETTINGS:
        held: Any = record.get(part) or {}
        if part == "optimizers":
            rows = _optimizer_rows(held)
        elif part == "model":
            rows = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in held.items()}
        elif part == "data":
            several = (record.get("trainer") or {}).get("processes", 1) != 1
            rows = {name: _data_text(value, several) for name, value in held.items()}
        else:
            rows = {name: plain_text(value) for name, value in held.items()}
        if rows:
            found[part] = {
                name.replace("_", " ") if part in ("model", "optimizers") else name: rows[name] for name in rows
            }
    return found


def _optimizer_rows(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    rows = {}
    for index, optimizer in enumerate(optimizers, start=1):
        which = f" {index}" if len(optimizers) > 1 else ""
        for name, value in optimizer.items():
            rows[f"optimizer{which}" if name == "class" else f"optimizer{which} {name}"] = plain_text(value)
    return rows


def _data_text(value: Any, several: bool) -> str:
    if not isinstance(value, Mapping):
        return plain_text(value)  # records of older versions hold the text
    samples, sizes = (each if isinstance(each, list) else [each] for each in map(value.get, ("samples", "batch_size")))
    # such as `60,000 samples in batches of 64, 938 batches`
    parts = []
    for count, size in zip_longest(samples, sizes):
        words = [f"{count:,} samples"] if isinstance(count, int) else []
        words += [f"batches of {size}"] if isinstance(size, int) else []
        if words:
            parts.append(" in ".join(words))
    if value.get("batches") is not None:
        parts.append(f"{number(value['batches'])} batches{' a process' if several else ''}")
    return ", ".join(parts)


# Summary and resumption


@dataclass(frozen=True)
class Resumption:
    """How to resume a stopped run: the command line, its working directory and the checkpoint to load.

    Attributes:
        words: The command.
        folder: The working directory of the command.
        checkpoint: The checkpoint to resume from.
    """

    words: list[str]
    folder: str
    checkpoint: str

    def environment(self) -> dict[str, str]:
        # The resumed run must record its own command, not that of this process.
        kept = {name: value for name, value in os.environ.items() if name != COMMAND_VARIABLE}
        return {**kept, RESUME_VARIABLE: self.checkpoint}


def resumption_of(place: Path) -> Resumption:
    record = read_record(place)
    if not record:
        raise ConfigurationError(f"{place} has no {NAME}, so the command that started the run is unknown.")
    if record.get("state") == RUNNING:
        process = record.get("process", {})
        raise ConfigurationError(
            f"The run in {place} is running, as process {process.get('id')} on {process.get('host')}. Stop it first.",
        )
    best = record.get("best", {})
    checkpoint = best.get("newest") or best.get("path")
    if not checkpoint:
        raise ConfigurationError(
            f"The run in {place} has no checkpoint to resume from. Start the run again: {record.get('command')}"
        )
    if HIDDEN in str(checkpoint):
        raise ConfigurationError(
            f"The checkpoint address of the run in {place} contains credentials, which are not recorded: "
            f"{checkpoint}. Set {RESUME_VARIABLE} to the full address, and run: {record.get('command')}",
        )
    if not record.get("argv"):
        raise ConfigurationError(
            f"The command of the run in {place} was not fully recorded: it contains a secret, or another launcher "
            f"started the run. Set the environment variable {RESUME_VARIABLE}={checkpoint}, and run: "
            f"{record.get('command')}",
        )
    return Resumption(list(record["argv"]), str(record.get("cwd", ".")), str(checkpoint))


def summary_of(place: Path, record: Mapping[str, Any]) -> list[str]:
    if not record:
        return [shown(str(place)), f"There is no {NAME}: the run was recorded by its trackers only."]
    rows: dict[str, str] = {"name": str(record["name"])} if record.get("name") else {}
    rows |= {"state": str(record.get("state", "-"))}
    if record.get("reason"):
        rows["state"] += f": {record['reason']}"
    rows["began"] = moment(record.get("started", 0))
    rows["took"] = duration(seconds_of(record))
    progress = record.get("progress", {})
    rows["progress"] = f"{number(progress.get('step'))} steps, {number(progress.get('epoch'))} epochs"
    rows["command"] = str(record.get("command", ""))
    rows["in"] = str(record.get("cwd", ""))
    for each in settings_of(record).values():
        rows |= each
    rows |= {name: number(value) for name, value in record.get("metrics", {}).items()}
    best = record.get("best", {})
    if best.get("monitor"):
        rows[f"best {best['monitor']}"] = number(best.get("value"))
    for name, key in (("best checkpoint", "path"), ("newest checkpoint", "newest")):
        if best.get(key):
            rows[name] = str(best[key])
    if record.get("warnings"):
        rows["warnings"] = str(len(record["warnings"]))
    if (place / PAGE).is_file():
        rows["page"] = str(place / PAGE)
    if record.get("resume"):
        rows["to resume"] = str(record["resume"])
    width = max(map(len, rows))
    return [shown(line) for line in (str(place), *(f"  {name:<{width}}  {value}" for name, value in rows.items()))]
