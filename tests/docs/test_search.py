"""Users' questions lead to the pages that answer them: asked of the built manual's own search, in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.browser import needs_chromium, search
from tests.pool import ROOT

pytestmark = needs_chromium

QUESTIONS: dict[str, list[str]] = yaml.safe_load((Path(__file__).parent / "questions.yaml").read_text())
WORDS: dict[str, str] = yaml.safe_load((ROOT / "docs" / "hooks" / "search_words.yaml").read_text())
FIRST = 3


@pytest.fixture(scope="session")
def found(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], list[str]]:
    return search(site, list(QUESTIONS), tmp_path_factory.mktemp("browser"))


def is_built(page: str, site: Path) -> bool:
    return (site / page / "index.html").is_file()


def page_of(address: str) -> str:
    """`howto/resume/#script` is a place on the page `howto/resume`."""
    return address.partition("#")[0].strip("/")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_page(question: str, found: tuple[dict[str, list[str]], list[str]], site: Path) -> None:
    pages = QUESTIONS[question]
    assert any(is_built(page, site) for page in pages), f"the manual has no page {' or '.join(pages)}"
    first = [page_of(address) for address in found[0][question]][:FIRST]
    assert set(pages) & set(first), f"found {first} for {question!r}"


def test_there_are_enough_questions() -> None:
    assert len(QUESTIONS) >= 60


def test_the_search_asks_nothing_of_other_hosts(found: tuple[dict[str, list[str]], list[str]]) -> None:
    assert found[1] == []


def test_words_are_given_to_pages_that_are_there(site: Path) -> None:
    assert not sorted(page for page in WORDS if not is_built(page, site))
