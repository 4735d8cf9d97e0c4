"""The page in a browser: its charts are drawn, in both colour schemes, and it asks for nothing outside of its file."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from drivetrain.callbacks.report.page import write_page
from tests.browser import document_of, needs_chromium, opened, result_of
from tests.trackers.test_report_page import run_in

pytestmark = needs_chromium

COLORS = {"light": ((255, 255, 255), (31, 111, 208)), "dark": ((20, 23, 26), (100, 168, 245))}
"""The colour of the page and that of the first curve."""


@pytest.mark.parametrize("scheme", COLORS)
def test_charts_are_drawn_and_nothing_is_fetched(tmp_path: Path, scheme: str) -> None:
    page = write_page(run_in(tmp_path / "run"))
    pixels, asked_for = opened(page, tmp_path, dark=scheme == "dark")
    paper, curve = COLORS[scheme]
    assert tuple(pixels[2, 2]) == paper
    # A curve is thin: what it draws are some hundred pixels of its own colour in the part of the page with charts.
    assert (np.abs(pixels[300:] - curve).sum(axis=2) <= 6).sum() > 500
    assert asked_for == []


def test_a_drag_zooms_all_charts_of_one_axis_and_a_double_click_shows_everything(tmp_path: Path) -> None:
    page = write_page(run_in(tmp_path / "run"))
    drag = """(async () => {
        const over = document.querySelector(".u-over"), box = over.getBoundingClientRect();
        const send = (name, share, target) => target.dispatchEvent(new MouseEvent(name,
            {clientX: box.left + share * box.width, clientY: box.top + 20, movementX: 9, button: 0, bubbles: true}));
        const axes = JSON.parse(document.getElementById("charts").textContent).map((chart) => chart.x);
        const shown = async () => {
            await new Promise((resume) => setTimeout(resume, 50));
            const all = [...document.querySelectorAll(".plot")].map((plot) => plot.dataset.shown || "all");
            return [true, false].map((same) => all.filter((_, index) => (axes[index] === axes[0]) === same));
        };
        const before = await shown();
        send("mousemove", 0.25, over);
        send("mousedown", 0.25, over);
        send("mousemove", 0.75, over);
        send("mouseup", 0.75, document);
        const zoomed = await shown();
        send("dblclick", 0.5, over);
        return {before, zoomed, after: await shown()};
    })()"""
    seen = result_of(page.read_text(), drag, tmp_path)
    first, last = map(float, seen["zoomed"][0][0].split())
    assert (first, last) == (pytest.approx(1 + 29 / 4, abs=0.5), pytest.approx(1 + 3 * 29 / 4, abs=0.5))
    assert len(seen["zoomed"][0]) > 1
    assert set(seen["zoomed"][0]) == {seen["zoomed"][0][0]}
    assert seen["zoomed"][1] == seen["before"][1]
    assert set(seen["after"][0]) == {"1 30"}


def test_a_page_is_no_wider_than_a_phone(tmp_path: Path) -> None:
    wide = {f"hyper_parameter_{number}" * 3: "a/long/path" * 20 for number in range(3)}
    page = write_page(
        run_in(tmp_path / "a_run_with_quite_a_long_name_of_its_own", hyper_parameters=wide, traceback="x" * 300)
    )
    frame = f'<iframe id="phone" width="360" height="800" srcdoc="{html.escape(page.read_text())}"></iframe>'
    measured = """(() => {
        const inner = document.getElementById("phone").contentDocument;
        return {drawn: inner.querySelectorAll("canvas").length, wide: inner.documentElement.scrollWidth};
    })()"""
    seen = result_of(f"<!doctype html><body>{frame}</body>", measured, tmp_path)
    assert seen["drawn"] >= 5
    assert seen["wide"] <= 360


def test_charts_of_one_axis_show_all_that_any_of_them_has(tmp_path: Path) -> None:
    """Training is logged from step 1 and validation from step 10: none of the two hides points of the other."""
    document = document_of(write_page(run_in(tmp_path / "run")), tmp_path)
    [data] = re.findall(r'<script[^>]*id="charts"[^>]*>(.*?)</script>', document, flags=re.DOTALL)
    charts = [chart for chart in json.loads(data) if chart["x"] == "step"]
    steps = [chart["data"][0] for chart in charts]
    assert len({(each[0], each[-1]) for each in steps}) > 1
    expected = {f"{min(each[0] for each in steps)} {max(each[-1] for each in steps)}"}
    shown = re.findall(r'<div[^>]*id="chart-(\d+)"[^>]*data-shown="([^"]*)"', document)
    kinds = [chart["x"] for chart in json.loads(data)]
    assert {axis for number, axis in shown if kinds[int(number)] == "step"} == expected
