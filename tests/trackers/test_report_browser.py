"""The page in a browser: its charts are drawn, in both colour schemes, and it asks for nothing outside of its file."""

from __future__ import annotations

import html
import json
import os
import platform
import re
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from drivetrain.callbacks.report.page import write_page
from drivetrain.trackers import CSVLogger
from tests.browser import document_of, needs_chromium, opened, result_in_frame, result_of
from tests.trackers.runs import PICTURE
from tests.trackers.test_report_page import charts_in, run_in

pytestmark = needs_chromium

HERE = {"host": platform.node(), "id": os.getpid(), "started": psutil.Process().create_time()}
"""The process of a run that is running."""

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


# Moves the slider of smoothing, and reads the legend of the first chart where its cursor is.
TOOLS = """
    const set = (id, value, event) => {
        const input = document.getElementById(id);
        input.value = value;
        input.dispatchEvent(new Event(event));
    };
    const wait = (milliseconds) => new Promise((go) => setTimeout(go, milliseconds));
    const legend = async (share) => {
        const over = document.querySelector(".u-over"), box = over.getBoundingClientRect();
        over.dispatchEvent(new MouseEvent("mousemove",
            {clientX: box.left + share * box.width, clientY: box.top + 20, movementX: 9, bubbles: true}));
        await wait(50);
        const rows = [...document.querySelector(".u-legend").querySelectorAll(".u-series")];
        return rows.filter((row) => getComputedStyle(row).display !== "none")
            .map((row) => [row.querySelector(".u-label").textContent, row.querySelector(".u-value").textContent]);
    };
"""


def test_the_slider_smooths_curves(tmp_path: Path) -> None:
    page = write_page(run_in(tmp_path / "run"))
    loss = charts_in(page.read_bytes())[0]["data"][1]
    script = f"""(async () => {{ {TOOLS}
        const before = await legend(1);
        set("smoothing", 0.8, "input");
        await wait(100);
        return {{before, after: await legend(1), text: document.querySelector("#tools output").textContent}};
    }})()"""
    seen = result_of(page.read_text(), script, tmp_path)
    print(seen)
    mean = weight = 0.0
    for value in loss:
        mean, weight = 0.8 * mean + 0.2 * value, 0.8 * weight + 0.2
    assert float(dict(seen["before"])["train_loss"]) == pytest.approx(loss[-1], rel=0.01)
    assert float(dict(seen["after"])["train_loss"]) == pytest.approx(mean / weight, rel=0.01)
    assert [name for name, _ in seen["after"]] == ["step", "train_loss", "val_loss"]  # the values behind have no entry
    assert seen["text"] == "0.80"


@pytest.mark.parametrize(("axis", "shown"), [("step", (1, 30)), ("epoch", (0.1, 3)), ("seconds", (0.1, 3))])
def test_curves_are_shown_by_step_epoch_or_time(axis: str, shown: tuple[float, float], tmp_path: Path) -> None:
    """The run takes ten steps in an epoch and in a second."""
    page = write_page(run_in(tmp_path / "run"))
    script = f"""(async () => {{ {TOOLS}
        set("axis", "{axis}", "change");
        await wait(100);
        const [[name, place]] = await legend(1);
        return {{name, place, shown: document.querySelector(".plot").dataset.shown}};
    }})()"""
    seen = result_of(page.read_text(), script, tmp_path)
    assert seen["name"] == ("time" if axis == "seconds" else axis)
    assert tuple(map(float, seen["shown"].split())) == pytest.approx(shown)
    assert seen["place"] == {"step": "30", "epoch": "3", "seconds": "0:03"}[axis]


def test_an_axis_that_is_not_known_is_not_offered(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run")
    (folder / "ranks" / "rank_0.csv").unlink()
    script = "[...document.getElementById('axis').options].map((option) => option.textContent)"
    assert result_of(write_page(folder).read_text(), script, tmp_path) == ["step", "epoch"]


# Presses the first button with a label, and returns what is offered for download.
SAVED = """
    const offered = [];
    URL.createObjectURL = (blob) => { offered.push(blob); return "data:,"; };
    const clicked = [];
    HTMLAnchorElement.prototype.click = function () { clicked.push(this.download); };
    const press = async (label) => {
        [...document.querySelectorAll(".chart button")].find((each) => each.textContent === label).click();
        for (let tries = 0; tries < 50 && !offered.length; tries++) await new Promise((go) => setTimeout(go, 100));
    };
"""


def test_a_chart_is_saved_as_a_table(tmp_path: Path) -> None:
    page = write_page(run_in(tmp_path / "run", name="brave otter"))
    script = f"(async () => {{ {SAVED} await press('CSV'); return [clicked[0], await offered[0].text()]; }})()"
    name, text = result_of(page.read_text(), script, tmp_path)
    assert name == "brave_otter-loss.csv"
    header, *rows = [line.split(",") for line in text.splitlines()]
    assert header == ["step", "epoch", "seconds", "train_loss", "val_loss"]
    assert len(rows) == 30
    assert [float(cell) for cell in rows[19]] == [20, 2, 2, 0.05, 1]
    assert rows[18][4] == ""


def test_a_chart_is_saved_as_a_picture(tmp_path: Path) -> None:
    page = write_page(run_in(tmp_path / "run"))
    paper, curve = COLORS["light"]
    script = f"""(async () => {{ {SAVED}
        // Encoding takes real time, of which a page without a window has none.
        let canvas = null;
        HTMLCanvasElement.prototype.toBlob = function (done) {{ canvas = this; done(new Blob(["picture"])); }};
        await press("PNG");
        const {{data}} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4)
            count += {list(curve)}.every((part, index) => Math.abs(part - data[at + index]) <= 2);
        return [clicked[0], [...data.slice(0, 3)], count];
    }})()"""
    name, corner, count = result_of(page.read_text(), script, tmp_path)
    assert name.endswith("run-loss.png")
    assert tuple(corner) == paper
    assert count > 100


# Changes what a reader can change, and waits until the page has loaded itself again.
RELOADED = """(async () => {
    const inner = frame.contentWindow;
    const find = (id) => frame.contentDocument.getElementById(id);
    const set = (id, value, event) => { find(id).value = value; find(id).dispatchEvent(new Event(event)); };
    set("smoothing", 0.5, "input");
    set("axis", "epoch", "change");
    const log = [...frame.contentDocument.querySelectorAll(".chart button")].find((each) => each.textContent === "log");
    log.click();
    LIVE
    inner.scrollTo(0, 333);
    inner.isOld = true;
    const end = performance.now() + 20000;
    await until(() => (frame.contentWindow.isOld === undefined && drawn()) || performance.now() > end);
    await new Promise((go) => setTimeout(go, 300));
    return {
        again: frame.contentWindow.isOld === undefined,
        smoothing: find("smoothing").value, axis: find("axis").value, scroll: frame.contentWindow.scrollY,
        log: [...frame.contentDocument.querySelectorAll(".chart button[aria-pressed=true]")].length,
        stale: !find("stale")?.hidden, live: !find("live")?.hidden,
    };
})()"""


def test_the_page_of_a_running_run_loads_itself_again_and_keeps_what_the_reader_chose(tmp_path: Path) -> None:
    page = write_page(run_in(tmp_path / "run", state="running", process=HERE, due=time.time()))
    seen = result_in_frame(page, RELOADED.replace("LIVE", ""), tmp_path)
    expected = {"again": True, "smoothing": "0.5", "axis": "epoch", "scroll": 333, "log": 1}
    assert seen == {**expected, "stale": False, "live": True}


def test_the_reader_can_stop_it(tmp_path: Path) -> None:
    page = write_page(run_in(tmp_path / "run", state="running", process=HERE, due=time.time()))
    assert not result_in_frame(page, RELOADED.replace("LIVE", "find('live').click();"), tmp_path)["again"]


def test_the_page_of_a_run_that_has_ended_stays(tmp_path: Path) -> None:
    seen = result_in_frame(write_page(run_in(tmp_path / "run")), RELOADED.replace("LIVE", ""), tmp_path)
    assert not seen["again"]


def test_a_page_without_updates_says_so(tmp_path: Path) -> None:
    page = write_page(run_in(tmp_path / "run", state="running", process=HERE, due=time.time() - 600))
    text = "new Promise((go) => setTimeout(go, 800)).then(() => document.getElementById('stale').textContent)"
    assert result_of(page.read_text(), text, tmp_path) == "No update for 10 min: the run may have been killed."


def test_pictures_of_earlier_steps_are_behind_a_slider(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run")
    logger = CSVLogger(tmp_path, "", "run")
    for step in (10, 20):
        logger.log_images({"sample": PICTURE}, step)
    script = """(() => {
        const slider = document.querySelector("input.steps"), seen = [];
        const look = () => seen.push([
            slider.nextElementSibling.textContent,
            [...document.querySelectorAll(".frame")].filter((each) => !each.hidden).map((each) => each.dataset.step),
            document.querySelector(".frame:not([hidden]) img").naturalWidth]);
        look();
        slider.value = 0;
        slider.dispatchEvent(new Event("input"));
        look();
        return seen;
    })()"""
    seen = result_of(write_page(folder).read_text(), script, tmp_path)
    assert seen == [["step 20", ["step 20"], 8], ["step 10", ["step 10"], 8]]


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
