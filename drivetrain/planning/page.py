"""HTML page of a plan, in the design of the run report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from drivetrain.callbacks.report.charts import Chart, Markup, Series, element, escaped, joined
from drivetrain.callbacks.report.page import PageParts, render
from drivetrain.callbacks.report.record import Curve
from drivetrain.planning.planner import Plan, Result, launch_line
from drivetrain.planning.run import Estimate
from drivetrain.planning.simulate import KINDS
from drivetrain.runtime.host import as_bytes

_COLORS = dict(zip(KINDS, (0, 1, 4, 2, 6, 3, 5, 9), strict=True))


def page(made: Plan, more: Mapping[str, Sequence[Result]]) -> bytes:
    best, device, workload = made.best, made.cluster.device, made.workload
    counted = [(result.candidate.label, result, result.estimate) for result in made.results if result.estimate]
    figures = [("devices", str(made.cluster)), ("memory of a device", as_bytes(device.memory))]
    figures += [("model parameters", _short(shown.parameters)) for *_, shown in counted[:1]]
    figures.append(("best rate", f"{_short(best.rate)} {made.unit}/s" if best else "nothing fits"))
    sections = [("Memory of each candidate", _bars(counted, made.unit))] if counted else []
    sections += [
        (f"Memory over a step of {label}", _timeline(shown)) for label, _, shown in counted[:1] if shown.timeline
    ]
    if best is not None:
        code = (launch_line(best, workload), best.candidate.python())
        sections.append(("How to train this way", joined((element("pre", each) for each in code), "\n")))
    tables = [_table("Candidates", made.results, made.unit, made.refused)]
    tables += [_table(name.capitalize(), results, made.unit, {}) for name, results in more.items()]
    model = {"source": workload.source, "inputs": " ".join(workload.inputs), "optimizer": workload.optimizer}
    peak = ", ".join(f"{dtype} {speed:g}" for dtype, speed in device.tflops.items())
    devices = {"device": device.name, "peak TFLOP/s": peak, "source": device.source}
    facts = [(name, [row for row in rows.items() if row[1]]) for name, rows in (("Model", model), ("Devices", devices))]
    style = Markup(Path(__file__).with_name("page.css").read_text(encoding="utf-8"))
    sections[:1] = [(heading, joined([element("style", style), content])) for heading, content in sections[:1]]
    title, lines = f"drivetrain plan {workload.source}", [made.advice, *made.notes]
    parts = PageParts(title, lines=lines, figures=figures, sections=sections, tables=tables, facts=facts)
    return render(parts, [chart for results in more.values() for chart in _charts(results, made.unit)])


def _short(count: float) -> str:
    """Format a number with three digits and a unit, such as `6.74 B`."""
    power = max(0, min(4, int(math.log10(max(1.0, count)) / 3)))
    return f"{float(f'{count / 1000**power:.3g}'):g} {('', 'K', 'M', 'B', 'T')[power]}".strip()


def _kinds(sizes: Sequence[Mapping[str, float]]) -> tuple[list[str], Markup]:
    found = [kind for kind in KINDS if any(each.get(kind, 0) > 0 for each in sizes)]
    items = (element("li", element("i", class_=f"c{_COLORS[kind]}"), kind) for kind in found)
    return found, element("ul", joined(items, "\n"), class_="key")


def _bars(counted: Sequence[tuple[str, Result, Estimate]], unit: str) -> Markup:
    device, limit = counted[0][1].cluster.device.memory, counted[0][1].memory
    whole = 1.02 * max(device, *(shown.peak for *_, shown in counted)) / 100
    side, place = ("left", device / whole) if device < 50 * whole else ("right", 100 - device / whole)
    lines = f'<hr class="limit" style="left:{limit / whole:.2f}%"><hr style="left:{device / whole:.2f}%">'
    cells = [f'<div></div><div>&nbsp;<b style="{side}:{place:.2f}%">device: {as_bytes(device)}</b></div>']
    for label, result, shown in counted:
        verdict = f"{as_bytes(shown.peak)}, {f'{_short(result.rate)} {unit}/s' if result.fits else 'too large'}"
        used, _ = _kinds([shown.kinds])
        told = {kind: f"{kind} {as_bytes(shown.kinds[kind])}" for kind in used}
        widths = {kind: f"width:{shown.kinds[kind] / whole:.3f}%" for kind in used}
        parts = (element("span", class_=f"c{_COLORS[k]}", style=widths[k], title=told[k]) for k in used)
        bar = element("div", *parts, class_="spent", role="img", aria_label=f"{label}: {', '.join(told.values())}")
        cells += [element("div", label, element("small", verdict)), element("div", bar, Markup(lines))]
    note = f"Candidates fit left of the dashed line, at {as_bytes(limit)}."
    legend = _kinds([shown.kinds for *_, shown in counted])[1]
    return joined([element("div", Markup("\n".join(cells)), class_="bars"), legend, element("p", note, class_="under")])


def _timeline(shown: Estimate) -> Markup:
    sizes = [each for *_, each in shown.timeline]
    totals, count = [sum(each.values()) for each in sizes], len(sizes)
    top = max(totals)
    peak, whole, tick = totals.index(top), 0.0112 * top, 2.0 ** math.floor(math.log2(max(4, top)) - 1)
    kinds, legend = _kinds(sizes)
    base, drawn = [0.0] * count, []
    for kind in kinds:
        above = [low + each.get(kind, 0) for low, each in zip(base, sizes, strict=True)]
        # Each operation is a step of the curve.
        edge = [(x + side, y) for x, y in enumerate(above) for side in (0, 1)]
        edge += [(x + side, base[x]) for x in reversed(range(count)) for side in (1, 0)]
        points = " ".join(f"{x},{100 - y / whole:.2f}" for x, y in edge)
        drawn.append(element("polygon", element("title", kind), points=points, style=f"fill:var(--c{_COLORS[kind]})"))
        base = above
    phases, at = [], 0
    for phase, run in groupby(phase for phase, *_ in shown.timeline):
        length = len([*run])
        drawn.append(element("path", d=f"M{at},0V100"))
        phases.append(element("span", phase, title=phase, style=f"width:{100 * length / count:.2f}%"))
        at += length
    levels = [tick * level for level in range(1, int(100 * whole / tick) + 1)]
    drawn += [element("path", d=f"M0,{100 - level / whole:.2f}H{count}") for level in levels]
    marks = [f'<i style="bottom:calc({level / whole:.2f}% - 10px)">{as_bytes(level)}</i>' for level in levels]
    where = f"{as_bytes(top)} in {' of '.join(filter(None, shown.timeline[peak][:2]))}"
    first, last = f"left:{100 * peak / count:.2f}%;right:0", f"left:0;right:{100 - 100 * (peak + 1) / count:.2f}%"
    place = first if peak < count / 2 else f"{last};text-align:right"
    marks.append(f'<i class="peak" style="{place}">{escaped(f"▾ {where}")}</i>')
    picture = element("svg", *drawn, viewBox=f"0 0 {count} 100", preserveAspectRatio="none")
    plot = element("div", picture, Markup("".join(marks)), class_="plan", role="img", aria_label=f"Peak: {where}")
    note = f"Operations from left to right. The peak is {where}."
    if top < 0.97 * shown.peak:
        note += f" The curve is of a model with fewer blocks; the whole model needs {as_bytes(shown.peak)}."
    box = element("div", plot, element("div", *phases, class_="phases"), class_="timeline")
    return joined([box, legend, element("p", note, class_="under")], "\n")


def _table(title: str, results: Sequence[Result], unit: str, refused: Mapping[str, str]) -> dict[str, Any]:
    found: list[tuple[str, list[str]]] = []
    for result in results:
        cells, shown = [str(result.cluster.world_size)], result.estimate
        if shown is None:
            cells += [*["-"] * 4, f"no estimate: {result.error}"]
        else:
            why = "" if result.fits else f"too large for {as_bytes(result.memory)}: "
            cells += [as_bytes(shown.peak), _short(result.rate), f"{1000 * shown.seconds:,.4g} ms"]
            cells += [f"{shown.waiting / shown.seconds:.0%}", f"{why}peak in {' of '.join(filter(None, shown.place))}"]
        found.append((result.candidate.label, cells))
    found += [(name, [*["-"] * 5, f"refused: {reason}"]) for name, reason in refused.items()]
    found = found or [("nothing fits", ["-"] * 6)]
    columns = ["candidate", "devices", "memory", f"{unit}/s", "step", "waiting", "why"]
    styles = [*[""] * 5, "wide"]
    rows = [{"name": n, "cells": [{"text": t, "style": s} for t, s in zip(c, styles, strict=True)]} for n, c in found]
    return {"title": title, "columns": columns, "rows": rows, "note": ""}


def _charts(results: Sequence[Result], unit: str) -> list[Chart]:
    names, charts = ("batch", "sequence", "devices"), []
    points = [
        (result, shown.peak, (result.candidate.batch, shown.tokens, result.cluster.world_size))
        for result in results
        if (shown := result.estimate) is not None
    ]
    varied = [index for index in range(len(names)) if len({at[index] for *_, at in points}) > 1]
    for index in varied:
        name = names[index]
        rate = Chart(f"{unit} per second over {name}, of what fits", "Throughput", x=name)
        memory = Chart(f"memory of a device over {name}", "Memory", x=name, unit="B")
        curves: dict[str, tuple[Curve, Curve]] = {}
        for result, peak, at in sorted(points, key=lambda each: each[2][index]):
            other = ", ".join(f"{names[each]} {at[each]}" for each in varied if each != index)
            speeds, sizes = curves.setdefault(other, (Curve(), Curve()))
            sizes.steps.append(at[index])
            sizes.values.append(peak)
            speeds.steps.extend([at[index]] if result.fits else [])
            speeds.values.extend([result.rate] if result.fits else [])
        rate.series = [Series(other or f"{unit}/s", speeds) for other, (speeds, _) in curves.items()]
        memory.series = [Series(other or "memory", sizes) for other, (_, sizes) in curves.items()]
        xs = sorted({float(at[index]) for *_, at in points})
        memory.series.append(Series("limit", Curve(xs, [points[0][0].memory] * len(xs)), is_dashed=True))
        charts += [rate, memory] if any(len(each.curve) for each in rate.series) else [memory]
    return charts
