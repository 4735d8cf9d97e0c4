"""The page of a plan in a browser: bars, lines, charts and words, in wide and narrow windows, without errors."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.planning.page import page
from drivetrain.planning.planner import Plan, Result, plan, vary
from drivetrain.runtime.host import as_bytes
from tests.browser import needs_chromium, opened, result_in_frame, result_of

COLORS = {"light": ((31, 111, 208), (192, 54, 44)), "dark": ((100, 168, 245), (240, 131, 122))}
"""The colours of parameters and of the device's line."""
LOOK = """(() => {
    const body = frame.contentDocument, view = frame.contentWindow;
    const box = (each) => each.getBoundingClientRect();
    const inside = (each) => each.closest(".scroll, pre, svg, .u-wrap") || !box(each).width;
    const beyond = [...body.querySelectorAll("main *, header *")].filter((each) =>
        !inside(each) && (box(each).right > view.innerWidth + 1 || box(each).left < -1));
    const rows = [...body.querySelectorAll(".bars .spent")].map((bar) => {
        const line = bar.parentElement.querySelector("hr:not(.limit)");
        return {
            name: bar.getAttribute("aria-label"), whole: box(bar).width,
            used: [...bar.children].reduce((sum, each) => sum + box(each).width, 0),
            line: box(line).left - box(bar).left, height: box(line).height,
        };
    });
    return {
        rows, beyond: beyond.map((each) => each.outerHTML.slice(0, 80)),
        scrolls: body.documentElement.scrollWidth > view.innerWidth,
        areas: [...body.querySelectorAll(".timeline polygon")].map((each) => box(each).height),
        phases: [...body.querySelectorAll(".phases span")].map((each) => each.textContent),
        peak: body.querySelector(".peak").textContent,
        drawn: [...body.querySelectorAll(".plot")].map((each) => Number(each.dataset.drawn)),
        text: body.body.innerText,
    };
})()"""


@pytest.fixture(scope="module")
def made() -> tuple[Plan, dict[str, list[Result]]]:
    model, inputs, names = "tests.planning.models:LM", ["8x128:int64"], ["ddp", "fsdp", "hsdp"]
    found = plan(model, "2xL4-24GB", inputs=inputs, batch=[8, 4096], strategies=names, recompute=[False], jobs=1)
    return found, {"varied": vary(found, batch=[8, 16], jobs=1), "largest seq": []}


@pytest.fixture(scope="module")
def content(made: tuple[Plan, dict[str, list[Result]]]) -> str:
    return page(*made).decode()


@needs_chromium
@pytest.mark.parametrize("width", [390, 1200])
def test_bars_lines_and_charts_are_drawn_within_the_window(
    made: tuple[Plan, dict[str, list[Result]]], content: str, width: int, tmp_path: Path
) -> None:
    found, _ = made
    seen = _seen(content, width, tmp_path)
    assert (seen["beyond"], seen["scrolls"]) == ([], False)
    results = [each for each in found.results if each.estimate is not None]
    assert [row["name"].partition(":")[0] for row in seen["rows"]] == [each.candidate.label for each in results]
    for row, result in zip(seen["rows"], results, strict=True):
        assert result.estimate is not None
        # Each kind is drawn at least one pixel wide.
        assert row["used"] / row["line"] == pytest.approx(
            result.estimate.peak / found.cluster.device.memory, abs=10 / row["line"]
        )
        assert 0 < row["line"] < row["whole"]
        assert row["height"] > 14
    assert {result.fits for result in results} == {True, False}
    best = found.best
    assert best is not None
    assert best.estimate is not None
    assert seen["phases"] == ["forward", "backward", "step"]
    assert max(seen["areas"]) > 20
    assert best.estimate.place[1] in seen["peak"]
    assert seen["drawn"] == [2, 2]  # speed and memory with two batches


@needs_chromium
def test_the_advice_comes_first_and_refused_candidates_have_their_reason(
    made: tuple[Plan, dict[str, list[Result]]], content: str, tmp_path: Path
) -> None:
    found, _ = made
    text = " ".join(_seen(content, 1200, tmp_path)["text"].split())
    assert text.startswith(f"drivetrain plan tests.planning.models:LM {found.advice}")
    assert found.best is not None
    for each in (
        *found.best.candidate.python().splitlines(),
        "drivetrain launch --num_processes 2",
        "nothing fits - -",
    ):
        assert " ".join(each.split()) in text
    assert f"too large for {as_bytes(found.best.memory)}" in text
    assert found.refused
    for name, reason in found.refused.items():
        assert f"{name} - - - - - refused: {reason}" in text


@needs_chromium
@pytest.mark.parametrize("scheme", COLORS)
def test_colours_follow_the_scheme_and_nothing_is_fetched(content: str, scheme: str, tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    target.write_text(content)
    pixels, asked_for = opened(target, tmp_path, dark=scheme == "dark")
    for color in COLORS[scheme]:
        assert (np.abs(pixels - color).sum(axis=2) <= 6).sum() > 20
    assert asked_for == []


@needs_chromium
def test_no_script_fails(content: str, tmp_path: Path) -> None:
    listen = "<script>window.failed = []; addEventListener('error', (event) => failed.push(event.message));"
    listen += "console.error = console.warn = (...words) => failed.push(words.join(' '));</script>"
    assert result_of(content.replace("<body>", f"<body>{listen}"), "failed", tmp_path) == []


def test_a_plan_without_a_result_that_fits_says_so(made: tuple[Plan, dict[str, list[Result]]]) -> None:
    found, _ = made
    large = tuple(each for each in found.results if not each.fits)
    text = html.unescape(re.sub(r"<[^>]+>", "", page(Plan(large, {}, found.cluster, found.workload), {}).decode()))
    assert "Nothing fits:" in " ".join(text.split())
    assert "How to train this way" not in text


def _seen(content: str, width: int, folder: Path) -> Any:
    target = folder / "plan.html"
    target.write_text(content)
    script = f"(frame.width = {width}, new Promise((go) => setTimeout(go, 300))).then(() => {LOOK})"
    return result_in_frame(target, script, folder)
