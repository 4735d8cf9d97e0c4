"""The table in docs/strategies.md holds: what it says works agrees with plain torch, what it says is refused is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.pairs import ROWS, TOLERANCES, Verdict, judge, read_table, write_table


def test_the_table_has_a_verdict_on_every_pair() -> None:
    found = read_table()
    assert found.keys() == ROWS.keys()
    assert all(row.keys() == TOLERANCES.keys() for row in found.values())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- the pairs: written by `python -m tests.conformance.pairs` -->\n\n<!-- end of the pairs -->\nafter"
    )
    verdicts = {"single": {name: Verdict("yes") for name in TOLERANCES}}
    verdicts["single"]["64"] = Verdict("refused", "No: use '32'.")
    write_table(verdicts, page)
    assert read_table(page) == verdicts
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter")


def marks_of(row: str) -> list[pytest.MarkDecorator]:
    """The lane of a row; one under DTensors takes a minute, and tests/conformance/test_parallel.py has most of it."""
    return [getattr(pytest.mark, ROWS[row].needs), *([pytest.mark.slow] if row == "tp" else [])]


@pytest.mark.parametrize("row", [pytest.param(name, marks=marks_of(name)) for name in ROWS])
def test_the_row_is_what_a_run_of_each_pair_finds(row: str) -> None:
    assert judge(row) == read_table()[row]
