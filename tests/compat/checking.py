"""What the tests of programs and scripts on some number of processes share: one launch with each Accelerate."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drivetrain.compat.accelerate import __version__
from tests.compat.cases import SCRIPTS, Program, Script
from tests.compat.running import APART, Job, Launch, furthest, launch
from tests.compat.running import PROGRAMS as FOLDER
from tests.pool import device


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
            before="" if script.before == "on_cpu.py" and device() != "cpu" else script.before,
            place=str(script),
            alone=bool(script.starts),
        )
        for number, arguments in enumerate(script.runs)
    ]


def scripts(processes: int) -> list[Any]:
    """Accelerate's own scripts on a number of processes, as parameters of a test."""
    return [
        pytest.param(script, marks=[pytest.mark.cpu(script.on_cpu)] if script.on_cpu else [], id=str(script))
        for script in SCRIPTS
        if script.processes == processes
    ]


class Launches:
    """The launches of a test session with the original and with ours, each made once.

    Args:
        request: The session: of a launch are the runs that its chosen tests ask about.
        factory: Makes folders.
    """

    def __init__(self, request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> None:
        chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        self.programs = [each["program"] for each in chosen if isinstance(each.get("program"), Program)]
        self.scripts = [each["script"] for each in chosen if isinstance(each.get("script"), Script)]
        self.factory = factory
        self.get = cache(self._get)

    def _get(self, kind: str, processes: int) -> Launch:
        mine = [program for program in self.programs if program.processes == processes]
        asked = [(each, each.options if kind == "ours" else each.original) for each in mine]
        jobs = {program.named(options): job_of(program, options) for program, options in asked}
        own = [job for each in self.scripts if each.processes == processes for job in jobs_of(each) if kind == "ours"]
        return launch(kind, processes, [*jobs.values(), *own], self.factory.mktemp("compat") / f"{kind}{processes}")

    def compare(self, program: Program) -> None:
        """Assert that a program's losses are those of the original."""
        theirs = self.get("original", program.processes).reported(program.named(program.original))
        ours = self.get("ours", program.processes).reported(str(program))
        # What is trained after a resume is what the run would have trained; the original draws other orders then.
        again = {name: name.partition(": ")[2] for name in ours if name.startswith("resumed") and ": " in name}
        assert {name: ours[name] for name in again} == {name: ours[base] for name, base in again.items()}
        assert theirs.keys() == ours.keys()
        kept = ours.keys() - again.keys()
        assert furthest({name: theirs[name] for name in kept}, {name: ours[name] for name in kept}) <= program.tolerance

    def check(self, script: Script) -> None:
        """Assert that one of Accelerate's own scripts passes."""
        assert importlib.metadata.version("accelerate") == __version__
        for job in jobs_of(script):
            self.get("ours", script.processes).passed(job.name)
