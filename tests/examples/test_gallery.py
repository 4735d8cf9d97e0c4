"""Every example of the gallery learns in a short run, and its page is what the recorded run in full makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.examples.gallery import PAGES, PICTURES, RECORD, SCRIPTS, Finished, contents
from tests.examples.gallery_pages import EXAMPLES, Example
from tests.examples.test_examples import run_example
from tests.pool import ROOT
from tests.shared_runs import SharedRuns

runs = SharedRuns(__name__, world_size=1, timeout=240)  # in one process, which imports what they need once

every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def short_run(name: str) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        run_example(f"gallery/{name}.py", ["--small", "--output", str(directory)])

    run.__name__ = name
    return run


SHORT = {example.name: runs(short_run(example.name)) for example in EXAMPLES}


def finished(example: Example) -> Finished:
    runs.of(SHORT[example.name])
    return Finished(runs.directory_of(SHORT[example.name]))


def test_every_script_has_a_page() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {example.name for example in EXAMPLES}


def test_every_example_shows_that_it_learns() -> None:
    assert all(example.learned or example.falls for example in EXAMPLES)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.learned], ids=lambda example: example.name)
def test_a_short_run_is_better_than_chance(example: Example) -> None:
    assert example.learned is not None
    name, side, bound = example.learned
    value = finished(example).results[name]
    assert value > bound if side == "above" else value < bound


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.falls], ids=lambda example: example.name)
def test_the_loss_of_a_short_run_falls(example: Example) -> None:
    run, _, metric = example.falls.partition(":")
    _, losses = finished(example).curve(metric, run)
    assert len(losses) > 1
    assert losses[-1] < losses[0]


@every_example
def test_a_short_run_has_all_that_the_page_shows(example: Example) -> None:
    results = finished(example).scalars()
    assert {name for _, name, _ in example.numbers} <= results.keys()
    recorded = json.loads(RECORD.read_text())["examples"][example.name]["results"]
    assert results.keys() == recorded.keys(), "run `python -m tests.examples.gallery --run`"


@pytest.mark.parametrize("path", sorted(contents()), ids=lambda path: path.stem)
def test_a_page_is_what_was_recorded(path: Path) -> None:
    assert path.read_text() == contents()[path], "run `python -m tests.examples.gallery`"


def test_nothing_in_the_gallery_is_left_over() -> None:
    names = {example.name for example in EXAMPLES}
    assert {path.stem for path in PAGES.glob("*.md")} == {"index", *names}
    assert {path.stem for path in (PAGES / "reports").iterdir()} == names
    assert {path.name for path in PICTURES.iterdir()} == {f"{name}{end}.png" for name in names for end in ("", "-card")}


@every_example
def test_a_recorded_run_took_less_than_a_minute(example: Example) -> None:
    assert json.loads(RECORD.read_text())["examples"][example.name]["seconds"] < 60


@every_example
def test_a_script_is_short_and_its_pictures_are_small(example: Example) -> None:
    lines = (SCRIPTS / f"{example.name}.py").read_text().splitlines()
    assert 60 <= sum(map(bool, lines)) <= 150
    assert (PICTURES / f"{example.name}.png").stat().st_size <= 40_000
    assert (PICTURES / f"{example.name}-card.png").stat().st_size <= 20_000


class Addresses(HTMLParser):
    """What a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loads = {"src", "srcset", "poster"} | ({"href"} if tag == "link" else set())
        self.found += [value for name, value in attrs if name in loads and value and not value.startswith("data:")]


@every_example
def test_a_report_loads_nothing_and_shows_a_users_command(example: Example) -> None:
    text = (PAGES / "reports" / f"{example.name}.html").read_text()
    assert Addresses(text).found == []
    assert len(text) <= 150_000
    assert f"examples/gallery/{example.name}.py" in text or example.name == "diffusion"  # a loop records no command
    assert not re.search(r"/(tmp|work|home|root)/", text)
    assert str(ROOT) not in text
