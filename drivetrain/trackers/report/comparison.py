"""Several runs on one page: curves over each other, results side by side, and what differs between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.trackers.report.charts import charts_of, in_order, is_higher_better, sampled_charts, stage_of
from drivetrain.trackers.report.frame import PageParts, render
from drivetrain.trackers.report.page import RunPage
from drivetrain.trackers.report.record import seconds_of
from drivetrain.trackers.report.words import duration, moment, number


def comparison_of(runs: Sequence[RunPage]) -> bytes:
    """The page that compares runs, as HTML.

    Args:
        runs: The runs, at least two.
    """
    names = distinct_names([run.folder for run in runs])
    charts = charts_of([run.values for run in runs], names)
    has_rate = any(chart.kind == "Learning rate" for chart in charts)
    for index, run in enumerate(runs):
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
    return render(PageParts(f"{len(runs)} runs compared", tables=shown), charts)


def distinct_names(places: Sequence[Path]) -> list[str]:
    """For each path its last parts, as many as distinguish it from the others.

    Args:
        places: The paths.
    """
    paths = [Path(os.path.abspath(place)) for place in places]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({index})" for index, path in enumerate(paths, start=1)]


def _runs(runs: Sequence[RunPage], names: Sequence[str]) -> dict[str, Any]:
    """When each run began, how it stands and with which command."""
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
    """The best and the last value of each metric; that of the best run is marked."""
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
    """What the runs were configured with: what differs first, and marked."""
    configurations = [run.configuration for run in runs]
    rows = []
    for name in dict.fromkeys(name for each in configurations for name in each):
        values = [each.get(name, "-") for each in configurations]
        cells = [{"text": value, "style": "wide"} for value in values]
        rows.append({"name": name, "cells": cells, "differs": len(set(values)) > 1})
    rows.sort(key=lambda row: not row["differs"])
    differing = sum(bool(row["differs"]) for row in rows)
    note = f"{differing} of {len(rows)} differ." if rows else ""
    return {"title": "Configuration", "columns": ["", *names], "rows": rows, "note": note}
