"""The pages under docs/start: what they show is what there is, and every one has a picture."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.pool import ROOT
from tests.test_snippets import scripts_of

START = ROOT / "docs" / "start"
PICTURES = ROOT / "docs" / "images" / "start"
PAGES = sorted([*START.glob("*.md"), *(ROOT / "docs").glob("migrating-from-*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_start_page_has_a_picture_that_is_small(page: Path) -> None:
    pictures = re.findall(r"!\[[^\]]{20,}\]\(((?:\.\./)?images/start/[\w]+\.png)\)", page.read_text())
    assert pictures
    for picture in pictures:
        file = (page.parent / picture).resolve()
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size <= 60_000


def test_every_picture_is_shown() -> None:
    shown = "".join(page.read_text() for page in [*PAGES, ROOT / "docs" / "index.md"])
    assert {path.name for path in PICTURES.iterdir()} == set(re.findall(r"images/start/(\w+\.png)", shown))


def test_the_extras_of_the_installation_page_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    table = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\[", project, flags=re.DOTALL)
    assert table is not None
    rows = (START / "installation.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(re.findall(r"^(\w+) = \[", table[1], flags=re.MULTILINE))


def test_the_quickstart_is_the_example_with_at_most_fifteen_statements() -> None:
    page = START / "quickstart.md"
    [script] = scripts_of(page, page.read_text())
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert set(own_statements(example)) - set(own_statements(script.text)) == {
        "print('predicted', digits[:12].tolist())",
        "print('labels   ', [label.item() for _, label in test][:12])",
    }
    own = own_statements(script.text.partition("labels = torch.stack")[0])
    assert len(own) <= 15
    assert f"{len(own)} statements" in page.read_text()


def own_statements(code: str) -> list[str]:
    """What is not an import, a docstring, or the line that begins a class or a method."""
    statements = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    given = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    texts = [ast.unparse(node) for node in statements if not isinstance(node, given)]
    return [text for text in texts if not text.startswith(("'", '"'))]
