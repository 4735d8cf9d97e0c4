"""`drivetrain explain`: what an error code means, in the terminal, without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from drivetrain import ConfigurationError
from drivetrain.cli.main import cli
from drivetrain.runtime.error_codes import causes
from tests.launch.launching import run

RUN = """
import sys
from drivetrain.cli.main import cli
cli(sys.argv[1:], standalone_mode=False)
assert "torch" not in sys.modules
"""


def test_a_code_is_explained_with_when_an_example_the_cause_and_what_to_do() -> None:
    shown = CliRunner().invoke(cli, ["explain", "DT-012"]).output
    cause = causes()["DT-012"]
    flat = " ".join(shown.split())
    assert shown.startswith(f"DT-012: {cause.title}\n\n{cause.raised}\n\nExample:\n\n    precision=")
    assert cause.example in flat
    assert "Cause: The strategy" in flat
    assert "What to do: Take one of the formats" in flat


def test_no_line_is_wider_than_a_terminal_and_no_link_is_left() -> None:
    for code in causes():
        shown = CliRunner().invoke(cli, ["explain", code]).output
        assert max(map(len, shown.splitlines())) <= 120
        assert ".md)" not in shown


def test_without_a_code_all_are_listed() -> None:
    lines = CliRunner().invoke(cli, ["explain"]).output.splitlines()
    assert [line.split()[0] for line in lines] == list(causes())


def test_an_unknown_code_is_an_error_with_a_code() -> None:
    result = CliRunner().invoke(cli, ["explain", "DT-999"])
    assert isinstance(result.exception, ConfigurationError)
    assert result.exception.code == "DT-001"


@pytest.mark.parametrize("arguments", [["explain", "DT-012"], ["explain"]])
def test_no_torch_is_imported(arguments: list[str], tmp_path: Path) -> None:
    ended = run("-c", RUN, *arguments, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert "DT-012" in ended.out
