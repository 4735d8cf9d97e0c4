"""Users' questions lead to the pages that answer them: asked of the built manual's own search, in a browser."""

from __future__ import annotations

import inspect
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
import yaml

from drivetrain import Accelerator, EarlyStopping, ModelCheckpoint, Trainer
from drivetrain.cli.launch import launch
from tests.browser import needs_chromium, search
from tests.pool import ROOT

pytestmark = needs_chromium

QUESTIONS: dict[str, list[str]] = yaml.safe_load((Path(__file__).parent / "questions.yaml").read_text())
WORDS: dict[str, str] = yaml.safe_load((ROOT / "docs" / "hooks" / "search_words.yaml").read_text())
FIRST = 3

Found = tuple[dict[str, list[list[str]]], list[str]]


def places_of_arguments() -> dict[str, list[str]]:
    """The names of arguments and flags, and where each is described."""
    places: dict[str, list[str]] = {}
    for owner in (Trainer, Accelerator, ModelCheckpoint, EarlyStopping):
        for name in inspect.signature(owner).parameters:
            if name != "every":  # a word that the search leaves out
                places.setdefault(name, []).append(f"#drivetrain.{owner.__name__}({name})")
    for option in launch.params:
        if isinstance(option, click.Option) and not option.hidden and option.name != "help":
            places.setdefault(f"--{option.name}", []).append(f"#launch--{option.name}")
    return places


ARGUMENTS = places_of_arguments()


@pytest.fixture(scope="session")
def found(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return search(site, [*QUESTIONS, *ARGUMENTS], tmp_path_factory.mktemp("browser"))


def is_built(page: str, site: Path) -> bool:
    return (site / page / "index.html").is_file()


def page_of(address: str) -> str:
    """`howto/resume/#script` is a place on the page `howto/resume`."""
    return address.partition("#")[0].strip("/")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_page(question: str, found: Found, site: Path) -> None:
    pages = QUESTIONS[question]
    assert any(is_built(page, site) for page in pages), f"the manual has no page {' or '.join(pages)}"
    first = [page_of(links[0]) for links in found[0][question]][:FIRST]
    assert set(pages) & set(first), f"found {first} for {question!r}"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_name_of_an_argument_or_flag_finds_its_description(name: str, found: Found) -> None:
    """A flag or a name of several words finds its page first; a word that is a topic too finds it among the pages."""
    pages = found[0][name][:1] if "_" in name or name.startswith("--") else found[0][name]
    links = [unquote(link) for page in pages for link in page]
    assert any(link.endswith(place) for place in ARGUMENTS[name] for link in links), f"found {links}"


def test_there_are_enough_questions() -> None:
    assert len(QUESTIONS) >= 60


def test_the_search_asks_nothing_of_other_hosts(found: Found) -> None:
    assert found[1] == []


def test_words_are_given_to_pages_that_are_there(site: Path) -> None:
    assert not sorted(page for page in WORDS if not is_built(page, site))
