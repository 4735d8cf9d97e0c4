"""Images and tables that a run has logged: reading them from its folder, and their HTML in the report."""

from __future__ import annotations

import base64
import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from drivetrain.callbacks.report.charts import Markup, element, joined
from drivetrain.callbacks.report.record import number

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
    """Table that a run has logged, as far as its page shows it.

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
    """Read the newest images of each name from the folder `images` of a run, which `CSVLogger` writes."""
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
    """Read the newest table of each name from the folder `tables` of a run, which `CSVLogger` writes."""
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
    """Yield the HTML of a run's images: a figure for each name, with a slider over the steps."""
    kept = _within_size(images)
    figures = [_figure(name, steps) for name, steps in kept.items() if steps]
    if figures:
        left_out = sum(map(len, images.values())) - sum(map(len, kept.values()))
        yield element("h2", "Images")
        yield element("div", joined(figures, "\n"), class_="images")
        if left_out:
            yield element("p", f"The images of {left_out} earlier steps are in the run's folder only.", class_="under")


def _within_size(images: Images) -> dict[str, dict[float, list[bytes]]]:
    """Return the newest images of each name that fit into a page. Every name keeps at least one image."""
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
    """Yield logged tables in the form in which a page shows tables."""
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
