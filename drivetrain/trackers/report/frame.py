"""The HTML of all pages: what they have in common, and their parts in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import drivetrain
from drivetrain.trackers.report.markup import Markup, element, joined, json_within_script
from drivetrain.trackers.report.words import moment

if TYPE_CHECKING:
    from drivetrain.trackers.report.charts import Chart

Rows = list[tuple[str, str]]

_HERE = Path(__file__).parent
_HINT = (
    "Drag across a chart to zoom all charts of the same axis, double-click to see everything; on a touch screen, pinch."
)


@dataclass
class PageParts:
    """What a page shows beside its charts. Everything is text, and escaped; what is empty has no heading.

    Attributes:
        title: The heading and the title of the window.
        state: The state of the run.
        lines: Lines under the heading.
        figures: Names and values of key figures.
        spent: The parts of the time: what each is called, its percentage, and its class of colour.
        tables: Tables: `title`, `columns`, `rows` of a `name` and `cells`, and a `note`.
        checkpoint: `facts` and `code` about the run's checkpoints.
        ended: Why the run ended.
        traceback: The traceback of the exception that ended it.
        warnings: Time and text of each warning.
        facts: What was run: a heading, and names with values.
    """

    title: str
    state: str = ""
    lines: Sequence[str] = ()
    figures: Rows = field(default_factory=list)
    spent: Sequence[tuple[str, str, str]] = ()
    tables: Sequence[Mapping[str, Any]] = ()
    checkpoint: Mapping[str, Any] | None = None
    ended: str = ""
    traceback: str = ""
    warnings: Rows = field(default_factory=list)
    facts: Sequence[tuple[str, Rows]] = ()


def render(parts: PageParts, charts: Sequence[Chart] = ()) -> bytes:
    """A page, whole.

    Args:
        parts: What it shows.
        charts: The charts, in order.
    """
    before, after = _shell()
    title = joined([element("title", parts.title), Markup('<link rel="icon" href="data:,">\n</head>\n<body>')], "\n")
    main = element("main", "\n", joined(_main(parts, charts), "\n"), "\n")
    text = joined([title, _header(parts), main, _footer(), _data(charts)], "\n")
    return b"".join((before, text.encode("utf-8", "replace"), after))


@cache
def _shell() -> tuple[bytes, bytes]:
    """What all pages begin with, and what all pages end with."""

    def own(*names: str) -> str:
        return "\n".join(_HERE.joinpath(name).read_text(encoding="utf-8").strip() for name in names)

    before = f"{own('head.html')}\n<style>{own('vendor/uPlot.min.css', 'page.css')}</style>\n"
    after = f"<script>{own('vendor/uPlot.iife.min.js')}</script>\n<script>{own('page.js')}</script>\n</body>\n</html>\n"
    return before.encode(), f"\n{after}".encode()


def _header(parts: PageParts) -> Markup:
    state = element("span", parts.state, class_=f"state {parts.state}") if parts.state else ""
    # Words are elements of their own: an option or a date is not broken at its hyphens.
    lines = (
        element("p", joined((element("span", word) for word in line.split()), " "), class_="under")
        for line in parts.lines
    )
    top = element("div", element("h1", parts.title), state, class_="top")
    figures = [_figures(parts.figures)] if parts.figures else []
    return element("header", "\n", joined([top, *lines, *figures], "\n"), "\n")


def _main(parts: PageParts, charts: Sequence[Chart]) -> Iterator[Markup]:
    if parts.spent:
        yield from _spent(parts.spent)
    yield from _charts(charts)
    for table in parts.tables:
        yield from _table(table)
    if parts.checkpoint:
        yield element("h2", "Checkpoint")
        yield _figures(parts.checkpoint["facts"], "mono")
        yield element("pre", parts.checkpoint["code"])
    if parts.ended:
        yield element("h2", "How it ended")
        yield element("p", parts.ended)
        if parts.traceback:
            yield element("pre", parts.traceback)
    if parts.warnings:
        items = (element("li", element("span", when, class_="when"), text) for when, text in parts.warnings)
        yield element("h2", "Warnings")
        yield element("ol", joined(items, "\n"), class_="warnings")
    if parts.facts:
        sections = (element("section", element("h3", heading), _pairs(rows)) for heading, rows in parts.facts)
        yield element("h2", "What was run")
        yield element("div", joined(sections, "\n"), class_="facts")


def _figures(rows: Rows, style: str = "") -> Markup:
    boxes = (element("div", element("dt", name), element("dd", value, class_=style)) for name, value in rows)
    return element("dl", joined(boxes, "\n"), class_="figures")


def _pairs(rows: Rows) -> Markup:
    return element("dl", joined((joined([element("dt", name), element("dd", value)]) for name, value in rows), "\n"))


def _spent(spent: Sequence[tuple[str, str, str]]) -> Iterator[Markup]:
    label = ", ".join(f"{name} {share} %" for name, share, _ in spent)
    bars = (element("span", class_=color, style=f"width:{share}%") for _, share, color in spent)
    items = (element("li", element("i", class_=color), f"{name} {share} %") for name, share, color in spent)
    yield element("h2", "Where the time went")
    yield element("div", *bars, class_="spent", role="img", aria_label=label)
    yield element("ul", joined(items, "\n"), class_="key")


def _charts(charts: Sequence[Chart]) -> Iterator[Markup]:
    """The places of charts, which the page's script draws."""
    sections: dict[str, list[Markup]] = {}
    for index, chart in enumerate(charts):
        head = element("div", element("h3", chart.title), class_="head")
        place = element("section", head, element("div", class_="plot", id=f"chart-{index}"), class_="chart")
        sections.setdefault(chart.section, []).append(place)
    for index, (heading, places) in enumerate(sections.items()):
        yield element("h2", heading)
        if index == 0:
            yield element("p", _HINT, class_="hint")
        yield element("div", joined(places, "\n"), class_="charts lanes" if heading == "Ranks" else "charts")


def _table(table: Mapping[str, Any]) -> Iterator[Markup]:
    head = element("tr", *(element("th", name, scope="col") for name in table["columns"]))
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
    yield element("h2", table["title"])
    yield element("div", content, class_="scroll")
    if table["note"]:
        yield element("p", table["note"], class_="under")


def _footer() -> Markup:
    written = f"Written {moment(time.time())} by drivetrain {drivetrain.__version__}."
    return element("footer", f"{written} Charts by uPlot, MIT License, © 2022 Leon Sorokin.")


def _data(charts: Sequence[Chart]) -> Markup:
    """The values of the charts, as the page's script reads them."""
    values = json.dumps([chart.as_data() for chart in charts], separators=(",", ":"))
    return element("script", json_within_script(values), type="application/json", id="charts")
