"""The page in a browser: its charts are drawn, in both colour schemes, and it asks for nothing outside of its file."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from drivetrain.trackers.report.page import write_page
from tests.trackers.test_report_page import run_in

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

COLORS = {"light": ((255, 255, 255), (31, 111, 208)), "dark": ((20, 23, 26), (100, 168, 245))}
"""The colour of the page and that of the first curve."""


@pytest.mark.parametrize("scheme", COLORS)
def test_charts_are_drawn_and_nothing_is_fetched(tmp_path: Path, scheme: str) -> None:
    page = write_page(run_in(tmp_path / "run"))
    picture, net_log = tmp_path / "page.png", tmp_path / "net.json"
    command = [
        *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-component-update", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--virtual-time-budget=3000"),
        *(f"--screenshot={picture}", "--window-size=1200,1400", f"--log-net-log={net_log}", page.as_uri()),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = np.round(matplotlib.image.imread(picture)[:, :, :3] * 255).astype(int)
    paper, curve = COLORS[scheme]
    assert tuple(pixels[2, 2]) == paper
    # A curve is thin: what it draws are some hundred pixels of its own colour in the part of the page with charts.
    assert (np.abs(pixels[300:] - curve).sum(axis=2) <= 6).sum() > 500
    assert asked_for_by_pages(net_log) == []


def asked_for_by_pages(net_log: Path) -> list[str]:
    """The addresses that pages have asked for; what the browser asks for by itself has no origin."""
    events = json.loads(net_log.read_text())["events"]
    assert events
    requests = [event["params"] for event in events if "initiator" in event.get("params", {})]
    return [each["url"] for each in requests if each["initiator"] != "not an origin" and not is_inline(each["url"])]


def is_inline(url: str) -> bool:
    return url.startswith("data:")
