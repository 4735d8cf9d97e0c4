"""Programs and scripts on two processes: with ours in the place of Accelerate, losses are equal and checks pass."""

from __future__ import annotations

import pytest

from tests.compat.cases import PROGRAMS, Program, Script
from tests.compat.checking import Launches, scripts


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.processes == 2], ids=str)
def test_losses_are_those_of_the_original(program: Program, launches: Launches) -> None:
    launches.compare(program)


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", scripts(2))
def test_accelerates_own_script_passes(script: Script, launches: Launches) -> None:
    launches.check(script)
