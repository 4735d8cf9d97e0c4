"""The page in a browser: its charts are drawn, in both colour schemes, and it asks for nothing outside of its file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from drivetrain.trackers.report.page import write_page
from tests.browser import document_of, needs_chromium, opened
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
