"""Programs over transformers, trl, peft and others: with ours in the place of Accelerate their losses are equal."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.compat.accelerate import __version__
from tests.compat.cases import PAGE, PROGRAMS, SCRIPTS, Program, Script, written
from tests.compat.running import APART, Job, Launch, furthest, launch
from tests.compat.running import PROGRAMS as FOLDER
from tests.pool import ROOT

# All that one number of processes runs is run in one launch, so on one worker of pytest-xdist.
ON_ONE = {processes: pytest.mark.xdist_group(f"{processes} processes") for processes in (1, 2)}


def grouped(cases):
    return [pytest.param(each, marks=ON_ONE[each.processes], id=str(each)) for each in cases]


def job_of(program: Program, options: tuple[str, ...]) -> Job:
    # The one package that is apart, for the one program that needs it.
    path = [APART] if "denoising" in program.name else []
    return Job(program.named(options), str(FOLDER / program.name), list(options), path=path)


def jobs_of(script: Script) -> list[Job]:
    """Each run of a script."""
    installed = importlib.metadata.distribution("accelerate").locate_file("accelerate/test_utils/scripts")
    variables = {"ACCELERATE_NUM_PROCESSES": str(script.starts), "DRIVETRAIN_USE_CPU": "1"} if script.starts else {}
    return [
        Job(
            f"{script}-{number}",
            str(Path(str(installed), script.name)),
            list(arguments),
            variables,
            unlike=list(script.unlike),
            before=script.before,
            place=str(script),
            alone=bool(script.starts),
        )
        for number, arguments in enumerate(script.runs)
    ]


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Launch]:
    """All chosen runs with the original or with ours on some number of processes, once."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    programs = [params["program"] for params in chosen if "program" in params]
    scripts = [params["script"] for params in chosen if "script" in params]
    done: dict[tuple[str, int], Launch] = {}

    def get(kind: str, processes: int) -> Launch:
        if (kind, processes) not in done:
            mine = [program for program in programs if program.processes == processes]
            asked = [(each, each.options if kind == "ours" else each.original) for each in mine]
            jobs = {program.named(options): job_of(program, options) for program, options in asked}
            own = [job for each in scripts if each.processes == processes for job in jobs_of(each) if kind == "ours"]
            root = tmp_path_factory.mktemp("compat") / f"{kind}{processes}"
            done[kind, processes] = launch(kind, processes, [*jobs.values(), *own], root)
        return done[kind, processes]

    return get


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", grouped(PROGRAMS))
def test_losses_are_those_of_the_original(program: Program, launched: Callable[..., Launch]) -> None:
    theirs = launched("original", program.processes).reported(program.named(program.original))
    ours = launched("ours", program.processes).reported(str(program))
    # What is trained after a resume is what the run would have trained; the original loses the order of later epochs.
    again = {name: name.partition(": ")[2] for name in ours if name.startswith("resumed") and ": " in name}
    assert {name: ours[name] for name in again} == {name: ours[base] for name, base in again.items()}
    assert theirs.keys() == ours.keys()
    kept = ours.keys() - again.keys()
    assert furthest({name: theirs[name] for name in kept}, {name: ours[name] for name in kept}) <= program.tolerance


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", grouped(SCRIPTS))
def test_accelerates_own_script_passes(script: Script, launched: Callable[..., Launch]) -> None:
    assert importlib.metadata.version("accelerate") == __version__
    for job in jobs_of(script):
        launched("ours", script.processes).passed(job.name)


def test_the_lane_collects_every_file_with_the_marker() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    marked = {file for file in files if "pytest.mark." + "compat" in (ROOT / file).read_text()}
    lane = (ROOT / "Makefile").read_text().partition("test-compat: ")[2].partition("\n\n")[0]
    assert {file for file in marked if file not in lane and "tests/compat/" not in file} == set()


def test_the_page_lists_what_is_run() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run `python -m tests.compat.cases`"
