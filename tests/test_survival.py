"""The table of what survives what names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "survival.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| what happens |")]
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)


def test_every_row_names_its_test() -> None:
    assert len(ROWS) > 30
    assert [row for row in ROWS if not re.search(r"\| `tests/[\w/]+\.py::test_\w+`[^|]*\|$", row)] == []


@pytest.mark.parametrize(("path", "name"), sorted(set(TESTS)), ids=str)
def test_the_tests_exist(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
