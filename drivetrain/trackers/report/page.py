"""The page of one run: `report.html` in its folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.runtime.byte_sizes import as_bytes
from drivetrain.trackers.report.charts import (
    SPENT,
    Chart,
    charts_of,
    in_order,
    is_higher_better,
    lane_charts,
    sampled_charts,
    stage_of,
)
from drivetrain.trackers.report.files import write_whole
from drivetrain.trackers.report.frame import PageParts, Rows, render
from drivetrain.trackers.report.lanes import Sample, read_lanes
from drivetrain.trackers.report.record import FAILED, PAGE, RUNNING, read_record, seconds_of
from drivetrain.trackers.report.values import RunValues, has_values, read_values
from drivetrain.trackers.report.words import duration, moment, number, plain_text

_MOST_ROWS = 200


@dataclass
class RunPage:
    """What a run has left in its folder.

    Attributes:
        folder: The folder, or a single file of values.
        record: What `run.json` holds; empty where there is none.
        values: What the trackers have written.
        lanes: What each process measured of itself.
    """

    folder: Path
    record: dict[str, Any] = field(default_factory=dict)
    values: RunValues = field(default_factory=RunValues)
    lanes: dict[int, tuple[str, list[Sample]]] = field(default_factory=dict)

    @classmethod
    def read(cls, place: str | os.PathLike[str], record: Mapping[str, Any] | None = None) -> RunPage:
        """Read a run.

        Args:
            place: Its folder, or a file of values.
            record: Its record, where the caller holds a newer one than the folder.

        Raises:
            ConfigurationError: There is nothing of a run there.
        """
        path = Path(place)
        known = dict(record) if record is not None else read_record(path) if path.is_dir() else {}
        values = RunValues() if known and not has_values(path) else read_values(path)
        return cls(path, known, values, read_lanes(path) if path.is_dir() else {})

    @property
    def samples(self) -> list[Sample]:
        """The samples of the first rank."""
        return next((samples for _, samples in self.lanes.values()), [])

    @property
    def configuration(self) -> dict[str, str]:
        """What the run was configured with, by name, as the page shows it."""
        found: dict[str, str] = {}
        for part in ("hyper_parameters", "trainer", "model", "data"):
            found.update({name: plain_text(value) for name, value in self.record.get(part, {}).items()})
        return found

    def charts(self) -> list[Chart]:
        """All charts, in order."""
        logged = charts_of([self.values])
        has_rate = any(chart.kind == "Learning rate" for chart in logged)
        found = [*logged, *sampled_charts(self.lanes, has_rate)]
        return [*in_order(found), *lane_charts(self.lanes)]


def write_page(
    place: str | os.PathLike[str], record: Mapping[str, Any] | None = None, with_values: bool = True
) -> Path:
    """Write the page of a run into its folder, whole, and return its path.

    Args:
        place: The folder.
        record: The run's record, where the caller holds a newer one than the folder.
        with_values: Whether to read what trackers and processes have written; without, the page has no curves.

    Raises:
        ConfigurationError: There is nothing of a run there.
    """
    target = Path(place, PAGE)
    run = RunPage.read(place, record) if with_values else RunPage(Path(place), dict(record or {}))
    write_whole(target, page_of(run))
    return target


def page_of(run: RunPage) -> bytes:
    """The page of a run, as HTML.

    Args:
        run: The run.
    """
    record = run.record
    reason = str(record.get("reason", ""))
    state = str(record.get("state", ""))
    parts = PageParts(
        title=name_of(run.folder),
        state=state,
        lines=_lines(run),
        figures=_figures(run),
        spent=_spent(run.samples),
        tables=_tables(run),
        checkpoint=_checkpoint(record.get("best", {}), record.get("resume", "")),
        ended=f"{state.capitalize()}: {reason}." if reason and state != RUNNING else "",
        traceback=str(record.get("traceback", "")),
        warnings=_warnings(record.get("warnings", ())),
        facts=_facts(record),
    )
    return render(parts, run.charts())


def name_of(place: Path) -> str:
    """The name of a run: the last parts of its path that distinguish it from others."""
    path = Path(os.path.abspath(place))
    return path.name if path.parent.name in ("", "drivetrain_logs") else f"{path.parent.name}/{path.name}"


# the parts of the page


def _lines(run: RunPage) -> list[str]:
    record, lines = run.record, []
    if record.get("command"):
        lines.append(str(record["command"]))
    if record.get("started"):
        first = next(iter(record.get("sessions") or [record]))
        lines.append(f"Began {moment(first['started'])}, as of {moment(record.get('updated', first['started']))}")
    return lines


def _figures(run: RunPage) -> Rows:
    """The numbers at the top."""
    record, found = run.record, []
    if record.get("started"):
        found.append(("took" if record.get("state") != RUNNING else "so far", duration(seconds_of(record))))
    progress = record.get("progress", {})
    steps = progress.get("step", max((curve.steps[-1] for curve in run.values.curves.values()), default=None))
    if steps is not None:
        found.append(("steps", number(steps)))
    if "epoch" in progress:
        found.append(("epochs", number(progress["epoch"])))
    best = record.get("best", {})
    if best.get("monitor") and best.get("value") is not None:
        found.append((f"best {best['monitor']}", number(best["value"])))
    samples = run.samples
    busy = [(each.samples_per_sec, each.seconds * each.busy) for each in samples if each.samples_per_sec > 0]
    weight = sum(seconds for _, seconds in busy)
    if weight > 0:
        shards = record.get("data_shards", len(run.lanes))  # fewer than processes where several share a batch
        rate = shards * sum(rate * seconds for rate, seconds in busy) / weight
        found.append(("samples per second", number(float(f"{rate:.3g}"))))
    used = [each.memory for _, lane in run.lanes.values() for each in lane if each.memory > 0]
    if used:
        found.append(("most memory seen", as_bytes(max(used))))
    return found


def _spent(samples: Sequence[Sample]) -> list[tuple[str, str, str]]:
    """The shares of the run's time, in percent, each with its colour."""
    whole = sum(each.seconds for each in samples)
    if whole <= 0:
        return []
    found = []
    for column, label, color in SPENT:
        share = 100 * sum(each.seconds * getattr(each, column) for each in samples) / whole
        if share >= 0.05:
            found.append((label, f"{share:.1f}", f"c{color}"))
    return found


def _tables(run: RunPage) -> list[dict[str, Any]]:
    """The validations, a row each, and the results of tests."""
    tables = []
    curves = run.values.curves
    names = [name for name in curves if stage_of(name) == "val"]
    if names:
        tables.append(_validations(run, names))
    tested = [name for name in curves if stage_of(name) == "test" and len(curves[name]) == 1]
    if tested:
        rows = [{"name": name, "cells": [{"text": number(curves[name].last)}]} for name in tested]
        tables.append({"title": "Test", "columns": ["", "value"], "rows": rows, "note": ""})
    return tables


def _validations(run: RunPage, names: Sequence[str]) -> dict[str, Any]:
    curves, epochs = run.values.curves, run.values.epochs
    monitor = run.record.get("best", {})
    by_step: dict[float, dict[str, float]] = {}
    best: dict[str, float] = {}
    for name in names:
        is_highest = is_higher_better(name)
        if monitor.get("monitor") == name:
            is_highest = monitor.get("mode") == "max"
        best[name] = curves[name].best(is_highest)[1]
        for step, value in zip(curves[name].steps, curves[name].values, strict=True):
            by_step.setdefault(step, {})[name] = value
    steps = sorted(by_step)
    kept = [step for step in steps if step in steps[-_MOST_ROWS:] or step in best.values()]
    rows = []
    for step in kept:
        cells = [{"text": number(step)}] if epochs else []
        cells += [
            {"text": number(by_step[step].get(name)), "style": "best" if best[name] == step else ""} for name in names
        ]
        rows.append({"name": number(epochs.get(step) if epochs else step), "cells": cells})
    note = "" if len(kept) == len(steps) else f"The last {_MOST_ROWS} of {len(steps)} validations, and the best."
    columns = ["epoch", "step", *names] if epochs else ["step", *names]
    return {"title": "Validation", "columns": columns, "rows": rows, "note": note}


def _checkpoint(best: Mapping[str, Any], resume: str) -> dict[str, Any] | None:
    path, newest = best.get("path"), best.get("newest")
    if not (path or newest):
        return None
    facts = []
    if path:
        facts.append((f"best by {best['monitor']}" if best.get("monitor") else "newest", path))
    if newest and newest != path:
        facts.append(("newest", newest))
    task, module = best.get("task", "Task"), best.get("module", "")
    lines = [f"from {module} import {task}", ""] if module and module != "__main__" else []
    lines += [
        "# the weights, to use them",
        f"task = {task}.load_from_checkpoint({path or newest!r})",
        "",
        "# the whole run, to train further",
        f"trainer.fit(task, ..., resume={newest or path!r})",
    ]
    if resume:
        lines += ["", "# the same in a terminal", f"$ {resume}"]
    return {"facts": facts, "code": "\n".join(lines)}


def _warnings(recorded: Iterable[Sequence[Any]]) -> Rows:
    found = []
    for when, step, text, count in recorded:
        times = f", {count} times" if count > 1 else ""
        found.append((f"{moment(when)}, step {step}{times}", str(text)))
    return found


def _facts(record: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    """What was run, in parts."""
    run = {"command": record.get("command"), "folder": record.get("cwd")}
    commit = record.get("commit") or {}
    if commit:
        changes = ", with changes that are not committed" if commit.get("changed") else ""
        run["commit"] = f"{commit.get('id', '')[:12]} on {commit.get('branch') or 'no branch'}{changes}"
    process = record.get("process", {})
    if process:
        run["host"] = process.get("host")
    parts = [
        ("Run", run),
        ("Hyper-parameters", record.get("hyper_parameters", {})),
        ("Trainer", record.get("trainer", {})),
        ("Model", record.get("model", {})),
        ("Data", record.get("data", {})),
        ("Environment", record.get("environment", {})),
    ]
    sessions = [*record.get("sessions", ()), record] if record.get("sessions") else []
    found = [
        (title, [(name, plain_text(value)) for name, value in rows.items() if value is not None])
        for title, rows in parts
        if rows
    ]
    parts_of_run = []
    for number_of, each in enumerate(sessions, start=1):
        state = FAILED if each.get("state") == RUNNING and each is not record else each.get("state")
        parts_of_run.append((f"part {number_of}", f"{moment(each.get('started', 0))}, {state}: {each.get('reason')}"))
    return [*found, ("Parts", parts_of_run)] if parts_of_run else found
