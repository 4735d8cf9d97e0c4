"""HTML page of a run, `report.html` in the run's folder, and pages and tables of several runs."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from drivetrain.callbacks.report.charts import (
    SPENT,
    Chart,
    Markup,
    Sample,
    charts_of,
    element,
    in_order,
    is_higher_better,
    joined,
    json_within_script,
    lane_charts,
    places_of,
    read_lanes,
    sampled_charts,
    shortened,
    stage_of,
)
from drivetrain.callbacks.report.record import (
    FAILED,
    PAGE,
    RUNNING,
    SETTINGS,
    UNREADABLE,
    RunValues,
    duration,
    has_values,
    moment,
    number,
    read_output,
    read_record,
    read_values,
    seconds_of,
    settings_of,
    write_whole,
)
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.exports import package_version
from drivetrain.runtime.host import as_bytes
from drivetrain.runtime.terminal import shown
from drivetrain.trackers.index import DIRECTORY, NAME, read_runs

# HTML of all pages


Rows = list[tuple[str, str]]

_HERE = Path(__file__).parent
_HINT = (
    "Drag across a chart to zoom all charts of the same axis, double-click to see everything; on a touch screen, pinch."
)
_AXES = (("step", "step"), ("epoch", "epoch"), ("seconds", "time"))
_SOONEST, _LATEST = 5.0, 600.0
"""Bounds of the seconds until the page of a running run loads itself again."""


@dataclass
class PageParts:
    """Contents of a run report's HTML page except for its charts: texts, tables and images.

    Attributes:
        title: The heading and the window title.
        state: The state of the run.
        lines: The lines under the heading.
        ended: The reason for the end of the run.
        place: The line of the user's code in which the run failed.
        traceback: The traceback of the exception that ended the run.
        figures: Names and values of key figures.
        spent: The parts of the run's time: label, percentage and color class.
        sections: Headings, each with HTML of its own, in front of the charts.
        tables: Tables with `title`, `columns`, `rows` of a `name` and `cells`, and a `note`.
        images: The images that the run has logged, by name and step.
        logged: The tables that the run has logged.
        checkpoint: `facts` and `code` about the run's checkpoints.
        output: The last lines that the run has logged and printed.
        warnings: Time and text of each warning.
        facts: Facts about the run: headings with names and values.
        due: The time of the next update of a running run, in seconds since 1970.
        places: Matching steps, epochs and seconds of each run, see `places_of`.
    """

    title: str
    state: str = ""
    lines: Sequence[str] = ()
    ended: str = ""
    place: str = ""
    traceback: str = ""
    figures: Rows = field(default_factory=list)
    spent: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[tuple[str, Markup]] = ()
    tables: Sequence[Mapping[str, Any]] = ()
    images: Images = field(default_factory=dict)
    logged: Sequence[LoggedTable] = ()
    checkpoint: Mapping[str, Any] | None = None
    output: str = ""
    warnings: Rows = field(default_factory=list)
    facts: Sequence[tuple[str, Rows]] = ()
    due: float = 0.0
    places: Sequence[Mapping[str, Sequence[float]]] = ()


def render(parts: PageParts, charts: Sequence[Chart] = ()) -> bytes:
    before, after = _page_frame()
    title = joined([element("title", parts.title), Markup('<link rel="icon" href="data:,">\n</head>\n<body>')], "\n")
    main = element("main", "\n", joined(_main(parts, charts), "\n"), "\n")
    text = joined([title, _header(parts), main, _footer(), _data(parts, charts)], "\n")
    return b"".join((before, text.encode("utf-8", "replace"), after))


@cache
def _page_frame() -> tuple[bytes, bytes]:
    """Return the HTML before and after the content of a report page, with styles and scripts."""

    def own(*names: str) -> str:
        return "\n".join(_HERE.joinpath(name).read_text(encoding="utf-8").strip() for name in names)

    before = f"{own('head.html')}\n<style>{own('vendor/uPlot.min.css', 'page.css')}</style>\n"
    after = f"<script>{own('vendor/uPlot.iife.min.js')}</script>\n<script>{own('page.js')}</script>\n</body>\n</html>\n"
    return before.encode(), f"\n{after}".encode()


def _header(parts: PageParts) -> Markup:
    state = element("span", parts.state, class_=f"state {parts.state}") if parts.state else ""
    # Each word is an element, so that options and dates are not broken at hyphens.
    lines = (
        element("p", joined((element("span", word) for word in line.split()), " "), class_="under")
        for line in parts.lines
    )
    # The page's JavaScript shows what only works with it, and only where it applies.
    live = element(
        "button", "live", id="live", type="button", title="Load this page again after each update", hidden="hidden"
    )
    stale = element("p", id="stale", class_="stale", hidden="hidden")
    running = (live, stale) if parts.state == RUNNING else ()
    top = element("div", element("h1", parts.title), state, *running, class_="top")
    figures = [_figure_boxes(parts.figures)] if parts.figures else []
    return element("header", "\n", joined([top, *lines, *_ending(parts), *figures], "\n"), "\n")


def _ending(parts: PageParts) -> Iterator[Markup]:
    if parts.ended:
        content = [element("p", parts.ended)]
        content += [element("p", parts.place, class_="mono")] if parts.place else []
        if parts.traceback:
            content.append(element("details", element("summary", "Traceback"), element("pre", parts.traceback)))
        yield element("section", *content, class_=f"ended {parts.state}")


def _main(parts: PageParts, charts: Sequence[Chart]) -> Iterator[Markup]:
    if parts.spent:
        yield from _spent_bars(parts.spent)
    for heading, content in parts.sections:
        yield joined([element("h2", heading), content], "\n")
    yield from _charts(charts)
    for table in parts.tables:
        yield from _table(table)
    yield from image_parts(parts.images)
    if parts.logged:
        yield element("h2", "Tables")
        for logged in table_parts(parts.logged):
            yield from _table(logged, "h3")
    if parts.checkpoint:
        yield element("h2", "Checkpoint")
        yield _figure_boxes(parts.checkpoint["facts"], "mono")
        yield element("pre", parts.checkpoint["code"])
    if parts.warnings:
        items = (element("li", element("span", when, class_="when"), text) for when, text in parts.warnings)
        yield element("h2", "Warnings")
        yield element("ol", joined(items, "\n"), class_="warnings")
    if parts.output:
        yield element("h2", "Output")
        yield element("pre", parts.output, class_="output")
    if parts.facts:
        sections = (element("section", element("h3", heading), _pairs(rows)) for heading, rows in parts.facts)
        yield element("h2", "What was run")
        yield element("div", joined(sections, "\n"), class_="facts")


def _figure_boxes(rows: Rows, style: str = "") -> Markup:
    boxes = (element("div", element("dt", name), element("dd", value, class_=style)) for name, value in rows)
    return element("dl", joined(boxes, "\n"), class_="figures")


def _pairs(rows: Rows) -> Markup:
    return element("dl", joined((joined([element("dt", name), element("dd", value)]) for name, value in rows), "\n"))


def _spent_bars(spent: Sequence[tuple[str, str, str]]) -> Iterator[Markup]:
    label = ", ".join(f"{name} {share} %" for name, share, _ in spent)
    bars = (element("span", class_=color, style=f"width:{share}%") for _, share, color in spent)
    items = (element("li", element("i", class_=color), f"{name} {share} %") for name, share, color in spent)
    yield element("h2", "Where the time went")
    yield element("div", *bars, class_="spent", role="img", aria_label=label)
    yield element("ul", joined(items, "\n"), class_="key")


def _charts(charts: Sequence[Chart]) -> Iterator[Markup]:
    sections: dict[str, list[Markup]] = {}
    for index, chart in enumerate(charts):
        head = element("div", element("h3", chart.title), class_="head")
        # The page's JavaScript draws the chart into the empty element with this ID.
        place = element("section", head, element("div", class_="plot", id=f"chart-{index}"), class_="chart")
        sections.setdefault(chart.section, []).append(place)
    for index, (heading, places) in enumerate(sections.items()):
        yield element("h2", heading)
        if index == 0:
            yield _tools()
            yield element("p", _HINT, class_="hint")
        yield element("div", joined(places, "\n"), class_="charts lanes" if heading == "Ranks" else "charts")


def _tools() -> Markup:
    slider = element("input", type="range", id="smoothing", min="0", max="0.99", step="0.01", value="0")
    axes = (element("option", label, value=unit) for unit, label in _AXES)
    smoothing = element("label", "Smoothing ", slider, element("output"))
    axis = element("label", "x axis ", element("select", *axes, id="axis"))
    return element("div", smoothing, axis, class_="tools", id="tools", hidden="hidden")


def _table(table: Mapping[str, Any], heading: str = "h2") -> Iterator[Markup]:
    # A heading stands over its cells: left where they are text.
    first = table["rows"][0]["cells"] if table["rows"] else []
    styles = ["", *(set(str(cell.get("style", "")).split()) & {"text", "wide"} for cell in first)]
    heads = zip_longest(table["columns"], ("text" if each else "" for each in styles[: len(table["columns"])]))
    head = element("tr", *(element("th", name, scope="col", class_=style) for name, style in heads))
    rows = (
        element(
            "tr",
            element("th", row["name"], scope="row"),
            *(element("td", cell["text"], class_=cell.get("style")) for cell in row["cells"]),
            class_="differs" if row.get("differs") else "",
        )
        for row in table["rows"]
    )
    content = element("table", element("thead", head), element("tbody", joined(rows, "\n")), class_="data")
    yield element(heading, table["title"])
    yield element("div", content, class_="scroll")
    if table["note"]:
        yield element("p", table["note"], class_="under")


def _footer() -> Markup:
    written = f"Written {moment(time.time())} by drivetrain {package_version()}."
    return element("footer", f"{written} Charts by uPlot, MIT License, © 2022 Leon Sorokin.")


def _data(parts: PageParts, charts: Sequence[Chart]) -> Markup:
    places = [{unit: list(map(shortened, column)) for unit, column in each.items()} for each in parts.places]
    refresh = min(max(_SOONEST, parts.due - time.time() + 1), _LATEST)
    page = {"title": parts.title, "state": parts.state, "due": parts.due, "refresh": refresh, "places": places}
    return joined([_json("page", page), _json("charts", [chart.as_data() for chart in charts])], "\n")


def _json(name: str, value: Any) -> Markup:
    text = json.dumps(value, separators=(",", ":"))
    return element("script", json_within_script(text), type="application/json", id=name)


_MOST_ROWS = 200


@dataclass
class RunPage:
    """Data of a run that its report page shows, read from the run's folder.

    Attributes:
        folder: The folder, or a single file of values.
        record: The content of `run.json`, or an empty dict.
        values: The values that trackers have written.
        lanes: The measurements of each rank.
    """

    folder: Path
    record: dict[str, Any] = field(default_factory=dict)
    values: RunValues = field(default_factory=RunValues)
    lanes: dict[int, tuple[str, list[Sample]]] = field(default_factory=dict)

    @classmethod
    def read(cls, place: str | os.PathLike[str], record: Mapping[str, Any] | None = None) -> RunPage:
        path = Path(place)
        known = dict(record) if record is not None else read_record(path) if path.is_dir() else {}
        values = RunValues() if known and not has_values(path) else read_values(path)
        return cls(path, known, values, read_lanes(path) if path.is_dir() else {})

    @property
    def samples(self) -> list[Sample]:
        return next((samples for _, samples in self.lanes.values()), [])

    @property
    def configuration(self) -> dict[str, str]:
        parts = settings_of(self.record, "hyper_parameters", "trainer", "optimizers", "model", "data")
        return {name: value for part in parts.values() for name, value in part.items()}

    def charts(self) -> list[Chart]:
        logged = charts_of([self.values])
        has_rate = any(chart.kind == "Learning rate" for chart in logged)
        found = [*logged, *sampled_charts(self.lanes, has_rate)]
        return [*in_order(found), *lane_charts(self.lanes)]


def write_page(
    place: str | os.PathLike[str], record: Mapping[str, Any] | None = None, with_values: bool = True
) -> Path:
    target = Path(place, PAGE)
    run = RunPage.read(place, record) if with_values else RunPage(Path(place), dict(record or {}))
    write_whole(target, page_of(run))
    return target


def page_of(run: RunPage) -> bytes:
    record = run.record
    reason = str(record.get("reason", ""))
    state = str(record.get("state", ""))
    parts = PageParts(
        title=title_of(run),
        state=state,
        lines=_lines(run),
        figures=_figures(run),
        spent=_time_shares(run.samples),
        tables=_tables(run),
        images={**read_images(run.folder), **run.values.images},
        logged=read_tables(run.folder),
        checkpoint=_checkpoint(record.get("best", {}), record.get("resume", "")),
        ended=f"{state.capitalize()}: {reason.rstrip('.')}." if reason and state != RUNNING else "",
        place=str(record.get("failed_at", "")),
        traceback=str(record.get("traceback", "")),
        output=read_output(run.folder),
        warnings=_warnings(record.get("warnings", ())),
        facts=_facts(record),
        due=float(record.get("due") or 0.0),
        places=[places_of(run.samples, run.values)],
    )
    return render(parts, run.charts())


def name_of(place: Path) -> str:
    path = Path(os.path.abspath(place))
    # such as `my_run/version_0`
    return path.name if path.parent.name in ("", "drivetrain_logs") else f"{path.parent.name}/{path.name}"


def title_of(run: RunPage) -> str:
    """Return the recorded name of a run, or else the end of its folder's path."""
    return str(run.record.get("name") or name_of(run.folder))


# Parts of a run's page


def _lines(run: RunPage) -> list[str]:
    record, lines = run.record, []
    if record.get("name"):
        lines.append(f"In {os.path.relpath(run.folder, record.get('cwd'))}")
    if record.get("command"):
        lines.append(str(record["command"]))
    if record.get("started"):
        first = next(iter(record.get("sessions") or [record]))
        lines.append(f"Began {moment(first['started'])}, as of {moment(record.get('updated', first['started']))}")
    return lines


def _figures(run: RunPage) -> Rows:
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
        shards = record.get("data_shards", len(run.lanes))  # fewer than processes if several share a batch
        # The mean over all samples, weighted by the time spent training.
        rate = shards * sum(rate * seconds for rate, seconds in busy) / weight
        found.append(("samples per second", number(float(f"{rate:.3g}"))))
    gpu = [(each.gpu, each.seconds) for _, lane in run.lanes.values() for each in lane if each.gpu >= 0]
    if gpu:
        mean = sum(share * seconds for share, seconds in gpu) / sum(seconds for _, seconds in gpu)
        found.append(("GPU in use", f"{100 * mean:.0f} %"))
    used = [each.memory for _, lane in run.lanes.values() for each in lane if each.memory > 0]
    if used:
        found.append(("most memory seen", as_bytes(max(used))))
    return found


def _time_shares(samples: Sequence[Sample]) -> list[tuple[str, str, str]]:
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
    run = {"command": record.get("command"), "folder": record.get("cwd")}
    commit = record.get("commit") or {}
    if commit:
        changes = ", with changes that are not committed" if commit.get("changed") else ""
        run["commit"] = f"{commit.get('id', '')[:12]} on {commit.get('branch') or 'no branch'}{changes}"
    process = record.get("process", {})
    if process:
        run["host"] = process.get("host")
    found = [("Run", [(name, str(value)) for name, value in run.items() if value is not None])]
    found = [each for each in found if each[1]]
    found += [(SETTINGS[part], list(rows.items())) for part, rows in settings_of(record).items()]
    sessions = [*record.get("sessions", ()), record] if record.get("sessions") else []
    parts_of_run = []
    for number_of, each in enumerate(sessions, start=1):
        # An earlier part that is still marked as running was killed.
        state = FAILED if each.get("state") == RUNNING and each is not record else each.get("state")
        parts_of_run.append((f"part {number_of}", f"{moment(each.get('started', 0))}, {state}: {each.get('reason')}"))
    return [*found, ("Parts", parts_of_run)] if parts_of_run else found


# Comparison of runs


def comparison_of(runs: Sequence[RunPage]) -> bytes:
    """Return an HTML page that compares several runs."""
    names = [str(run.record.get("name", "")) for run in runs]
    if not all(names) or len(set(names)) < len(names):
        names = distinct_names([run.folder for run in runs])
    charts = charts_of([run.values for run in runs], names)
    has_rate = any(chart.kind == "Learning rate" for chart in charts)
    for index, run in enumerate(runs):
        # One curve per run keeps the comparison readable.
        first = {rank: lane for rank, lane in run.lanes.items() if rank == 0}
        for chart in sampled_charts(first, has_rate, index, names[index]):
            same = next((each for each in charts if (each.title, each.x) == (chart.title, chart.x)), None)
            if same is None:
                charts.append(chart)
            else:
                same.series += chart.series
    charts = in_order(charts)
    tables = [_runs(runs, names), _results(runs, names), _configuration(runs, names)]
    shown = [table for table in tables if table["rows"]]
    places = [places_of(run.samples, run.values) for run in runs]
    return render(PageParts(f"{len(runs)} runs compared", tables=shown, places=places), charts)


def distinct_names(places: Sequence[Path]) -> list[str]:
    paths = [Path(os.path.abspath(place)) for place in places]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({index})" for index, path in enumerate(paths, start=1)]


def _runs(runs: Sequence[RunPage], names: Sequence[str]) -> dict[str, Any]:
    rows = []
    for run, name in zip(runs, names, strict=True):
        record = run.record
        if not record:
            continue
        began = moment(record["started"]) if record.get("started") else "-"
        cells = [
            {"text": began, "style": "text"},
            {"text": record.get("state", "-"), "style": "text"},
            {"text": duration(seconds_of(record))},
            {"text": number(record.get("progress", {}).get("step"))},
            {"text": record.get("command", ""), "style": "wide mono"},
        ]
        rows.append({"name": name, "cells": cells})
    return {
        "title": "Runs",
        "columns": ["run", "began", "state", "took", "steps", "command"],
        "rows": rows,
        "note": "",
    }


def _results(runs: Sequence[RunPage], names: Sequence[str]) -> dict[str, Any]:
    metrics = dict.fromkeys(name for run in runs for name in run.values.curves)
    rows = []
    for metric in metrics:
        if not stage_of(metric) and "loss" not in metric.lower():
            continue
        is_highest = is_higher_better(metric)
        found = [run.values.curves.get(metric) for run in runs]
        best = [None if curve is None else curve.best(is_highest)[0] for curve in found]
        known = [value for value in best if value is not None and value == value]
        top = (max if is_highest else min)(known) if known else None
        cells = []
        for curve, value in zip(found, best, strict=True):
            text = number(value)
            if curve is not None and len(curve) > 1:
                text = f"{text}, last {number(curve.last)}"
            cells.append({"text": text, "style": "best" if value is not None and value == top else ""})
        rows.append({"name": f"{metric} ({'highest' if is_highest else 'lowest'})", "cells": cells})
    return {"title": "Results", "columns": ["metric", *names], "rows": rows, "note": ""}


def _configuration(runs: Sequence[RunPage], names: Sequence[str]) -> dict[str, Any]:
    configurations = [run.configuration for run in runs]
    rows = []
    for name in dict.fromkeys(name for each in configurations for name in each):
        values = [each.get(name, "-") for each in configurations]
        cells = [{"text": value, "style": "wide"} for value in values]
        rows.append({"name": name, "cells": cells, "differs": len(set(values)) > 1})
    # Settings that differ come first, since a comparison is about them.
    rows.sort(key=lambda row: not row["differs"])
    differing = sum(bool(row["differs"]) for row in rows)
    note = f"{differing} of {len(rows)} differ." if rows else ""
    return {"title": "Configuration", "columns": ["", *names], "rows": rows, "note": note}


# Index of runs


@dataclass(frozen=True)
class KnownRun:
    """Run listed in the index of a log directory, with the content of its `run.json`.

    Attributes:
        when: The start time, as written in the index.
        name: The name in the index.
        place: The folder, file or address of the run.
        command: The command that started the run.
        record: The content of `run.json`, or an empty dict.
    """

    when: str
    name: str
    place: str
    command: str
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """The state of the run, such as `"running"` or `"failed"`."""
        return str(self.record.get("state", ""))

    @property
    def title(self) -> str:
        return str(self.record.get("name", ""))

    @property
    def metric(self) -> str:
        # A record that cannot be read has only the reason for this.
        if self.state == UNREADABLE:
            return str(self.record.get("reason", ""))
        best = self.record.get("best", {})
        if best.get("monitor") and best.get("value") is not None:
            return f"{best['monitor']} {number(best['value'])}"
        metrics = self.record.get("metrics", {})
        for name in ("val_loss", "train_loss", *metrics):
            if name in metrics and "loss" in name:
                return f"{name} {number(metrics[name])} (last)"
        return ""


def list_runs(directory: str | os.PathLike[str]) -> list[KnownRun]:
    """Return the runs in the index of a log directory, newest first.

    A run that writes to several folders is listed once.
    """
    found = [
        KnownRun(each.when, each.name, each.place, each.command, read_record(each.place))
        for each in read_runs(directory)
    ]
    # A run that writes to several folders has several entries, but only one record.
    recorded = {(run.when, run.command) for run in found if run.record}
    return [run for run in found if run.record or (run.when, run.command) not in recorded]


def find_run(name: str, directory: str | os.PathLike[str] = ".") -> Path:
    """Return the folder or file of a run, given its path or its name in the index."""
    if os.path.exists(name):
        return Path(name)
    known = {each.name: each.place for each in read_runs(directory)}
    if name in known and os.path.exists(known[name]):
        return Path(known[name])
    titled = next((run.place for run in list_runs(directory) if run.title == name), None)
    if titled is not None and os.path.exists(titled):
        return Path(titled)
    if name in known:
        raise ConfigurationError(f"The run {name!r} is listed, but its directory {known[name]} no longer exists.")
    raise ConfigurationError(
        f"There is no run {name!r}: it is neither a path nor a name in {Path(directory, DIRECTORY, NAME)}."
        f"{nearest(name, known)} `drivetrain runs --dir {os.fspath(directory)}` lists the known runs.",
    )


def as_table(runs: Sequence[KnownRun], width: int) -> list[str]:
    rows: list[tuple[str, ...]] = [("began", "run", "name", "state", "metric", "command")]
    rows += [
        tuple(map(shown, (run.when, run.name, run.title or "-", run.state or "-", run.metric or "-", run.command)))
        for run in runs
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([*map(str.ljust, row[:5], widths), row[5]]) for row in rows]
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


# Images and tables that a run has logged: reading them from its folder, and their HTML in the report


IMAGES, TABLES = "images", "tables"
"""Folders of a run for what `CSVLogger.log_images` and `CSVLogger.log_table` write."""

_KINDS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"))
_MOST_BYTES = 4 * 2**20
"""The size of all images of a page, above which the older ones are left out."""
_MOST_STEPS, _MOST_IMAGES = 12, 32
"""The number of steps of each name, and of images of each step, that a page shows."""
_MOST_ROWS, _MOST_COLUMNS = 50, 30

Images = Mapping[str, Mapping[float, Sequence[bytes]]]
"""Image files by name and step. The step is NaN if an image was logged without one."""


@dataclass
class LoggedTable:
    """Table that a run has logged, of which the report page shows the first rows.

    Attributes:
        name: The name of the table.
        step: The newest step at which it was logged, or "" if it was logged without one.
        columns: The column names.
        rows: The first rows.
        count: The number of rows that were logged.
    """

    name: str
    step: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    count: int = 0


def read_images(folder: Path) -> dict[str, dict[float, list[bytes]]]:
    """Read the newest logged images of each name from a run's folder."""
    found: dict[str, dict[float, list[bytes]]] = {}
    for directory in sorted(each for each in folder.joinpath(IMAGES).glob("*") if each.is_dir()):
        steps: dict[float, dict[int, Path]] = {}
        for path in directory.glob("*.png"):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?|image", path.stem)
            if match:
                steps.setdefault(float(match[1] or "nan"), {})[int(match[2] or 0)] = path
        newest = sorted(steps, reverse=True)[:_MOST_STEPS]
        images = {step: [path.read_bytes() for _, path in sorted(steps[step].items())] for step in reversed(newest)}
        if images:
            found[directory.name] = images
    return found


def read_tables(folder: Path) -> list[LoggedTable]:
    """Read the newest logged table of each name from a run's folder."""
    newest: dict[str, tuple[int, Path]] = {}
    for path in sorted(folder.joinpath(TABLES).glob("*.csv")):
        match = re.fullmatch(r"(.+)-(\d+)", path.stem)
        name, number_of = (match[1], int(match[2])) if match else (path.stem, -1)
        if name not in newest or newest[name][0] < number_of:
            newest[name] = (number_of, path)
    found = []
    for name, (step, path) in newest.items():
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            lines = csv.reader(file)
            table = LoggedTable(name, "" if step < 0 else str(step), next(lines, []), list(islice(lines, _MOST_ROWS)))
            table.count = len(table.rows) + sum(1 for _ in lines)
        found.append(table)
    return found


def image_parts(images: Images) -> Iterator[Markup]:
    """Yield the HTML of a run's images, with a slider over the steps."""
    kept = _within_size(images)
    figures = [_figure(name, steps) for name, steps in kept.items() if steps]
    if figures:
        left_out = sum(map(len, images.values())) - sum(map(len, kept.values()))
        yield element("h2", "Images")
        yield element("div", joined(figures, "\n"), class_="images")
        if left_out:
            yield element("p", f"The images of {left_out} earlier steps are in the run's folder only.", class_="under")


def _within_size(images: Images) -> dict[str, dict[float, list[bytes]]]:
    kept: dict[str, dict[float, list[bytes]]] = {name: {} for name in images}
    size = 0
    orders = {name: sorted(steps, reverse=True)[:_MOST_STEPS] for name, steps in images.items()}
    for turn in range(max(map(len, orders.values()), default=0)):
        for name, step in ((name, order[turn]) for name, order in orders.items() if turn < len(order)):
            for image in images[name][step][:_MOST_IMAGES]:
                if _kind_of(image) and (not kept[name] or size + len(image) <= _MOST_BYTES):
                    kept[name].setdefault(step, []).append(image)
                    size += len(image)
    return {name: dict(sorted(steps.items())) for name, steps in kept.items()}


def _kind_of(content: bytes) -> str:
    return next((kind for start, kind in _KINDS if content.startswith(start)), "")


def _figure(name: str, steps: Mapping[float, Sequence[bytes]]) -> Markup:
    texts = [f"step {number(step)}" if step == step else "" for step in steps]
    last = len(steps) - 1
    frames = []
    for index, (text, images) in enumerate(zip(texts, steps.values(), strict=True)):
        pictures = (
            element("img", alt=name, src=f"data:image/{_kind_of(each)};base64,{base64.b64encode(each).decode()}")
            for each in images
        )
        # Without JavaScript, as in a mail program, the newest step is shown.
        frames.append(
            element("div", *pictures, class_="frame", data_step=text, hidden="hidden" if index < last else "")
        )
    slider = element("input", type="range", class_="steps", name=name, min="0", max=str(last), value=str(last))
    step = element("label", slider if last else "", element("output", texts[-1]))
    return element("figure", element("figcaption", element("h3", name), step), *frames)


def table_parts(tables: Sequence[LoggedTable]) -> Iterator[dict[str, Any]]:
    for table in tables:
        width = min(len(table.columns), _MOST_COLUMNS)
        styles = [
            "" if all(_is_number(row[at]) for row in table.rows if at < len(row)) else "text" for at in range(width)
        ]
        rows = [
            {
                "name": "".join(row[:1]),
                "cells": [
                    {"text": cell, "style": style} for cell, style in zip(row[1:width], styles[1:], strict=False)
                ],
            }
            for row in table.rows
        ]
        note = f"The first {len(rows)} of {table.count} rows." if table.count > len(rows) else ""
        note += f" The first {width} of {len(table.columns)} columns." if len(table.columns) > width else ""
        title = f"{table.name}, step {table.step}" if table.step else table.name
        yield {"title": title, "columns": table.columns[:width], "rows": rows, "note": note.strip()}


def _is_number(cell: str) -> bool:
    try:
        float(cell or "nan")
    except ValueError:
        return False
    return True
