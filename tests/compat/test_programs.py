"""Programs over transformers, trl, peft and others: with ours in the place of Accelerate their losses are equal."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from drivetrain.compat.accelerate import __version__
from tests.compat.cases import PAGE, PROGRAMS, SCRIPTS, Program, Script, written
from tests.compat.running import PROGRAMS as FOLDER
from tests.compat.running import furthest, launch_with_ours, with_original, with_ours

RUN_CHECKS = Path(__file__).parent / "run_checks.py"


@pytest.fixture(scope="session")
def references() -> dict[tuple[str, ...], dict[str, float]]:
    """What programs reported with the original, once for each."""
    return {}


@pytest.mark.compat
@pytest.mark.timeout(500)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_losses_are_those_of_the_original(program: Program, references, tmp_path: Path) -> None:
    script = FOLDER / program.name
    # The one package that is apart, for the one program that needs it.
    apart = {"PYTHONPATH": os.path.join(sys.prefix, "torchvision")} if "denoising" in program.name else {}
    asked = list(program.options if program.reference is None else program.reference)
    key = (program.name, str(program.processes), *asked)
    if key not in references:
        references[key] = with_original(script, asked, program.processes, tmp_path / "original", **apart)
    ours = with_ours(script, list(program.options), program.processes, tmp_path / "ours", **apart)
    assert furthest(references[key], ours) <= program.tolerance


@pytest.mark.compat
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_accelerates_own_script_passes(script: Script, tmp_path: Path) -> None:
    installed = importlib.metadata.distribution("accelerate").locate_file("accelerate/test_utils/scripts")
    assert importlib.metadata.version("accelerate") == __version__
    path = Path(str(installed), script.name)
    if script.unlike:
        done = launch_with_ours(RUN_CHECKS, [str(path), *script.unlike], script.processes, tmp_path / "run")
    else:
        done = launch_with_ours(path, [], script.processes, tmp_path / "run")
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_the_page_lists_what_is_run() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run `python -m tests.compat.cases`"
