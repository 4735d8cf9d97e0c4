"""The table of what survives what names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "survival.md").read_text(encoding="utf-8"))


def test_the_table_names_tests() -> None:
    assert len(ROWS) > 15


@pytest.mark.parametrize(("path", "name"), ROWS)
def test_every_row_points_at_its_test(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert name in found if name else found
