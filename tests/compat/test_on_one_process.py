"""Programs and scripts on one process: with ours in the place of Accelerate, losses are equal and checks pass."""

from __future__ import annotations

import pytest

from tests.compat.cases import PAGE, PROGRAMS, Program, Script, table
from tests.compat.checking import Launches, scripts
from tests.compat.pages import written
from tests.pool import ROOT


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.processes == 1], ids=str)
def test_losses_are_those_of_the_original(program: Program, launches: Launches) -> None:
    launches.compare(program)


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", scripts(1))
def test_accelerates_own_script_passes(script: Script, launches: Launches) -> None:
    launches.check(script)


def test_the_lane_collects_every_file_with_the_marker() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    marked = {file for file in files if "pytest.mark." + "compat" in (ROOT / file).read_text()}
    lane = (ROOT / "Makefile").read_text().partition("test-compat: ")[2].partition("\n\n")[0]
    assert {file for file in marked if file not in lane and "tests/compat/" not in file} == set()


def test_the_page_lists_what_is_run() -> None:
    page = PAGE.read_text()
    assert page == written(page, table()), "run `python -m tests.compat.cases`"
