"""Programs written for Lightning, unchanged, under Lightning and under ours: every loss and metric is the same."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.compat import lightning_data
from tests.compat.lightning_cases import PAGE, TOLERANCE
from tests.compat.lightning_programs import EXAMPLES, PART, PROGRAMS, LightningProgram, table
from tests.compat.pages import written
from tests.compat.running import APART, Job, Launch, furthest, launch
from tests.compat.running import PROGRAMS as OURS

OVER_RANKS = ("validation", "test", "end", "predicted")
"""What is one number for all processes; where Lightning has one for each, ours is their mean."""


class Runs:
    """The launches of a test session, each made once for all programs that its chosen tests ask about.

    Args:
        request: The session.
        factory: Makes folders.
    """

    def __init__(self, request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> None:
        chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        self.chosen = {
            (each["program"], each["processes"]) for each in chosen if isinstance(each.get("program"), LightningProgram)
        }
        self.factory = factory
        self.launched = cache(self._launched)
        self.copied = cache(self._copied)

    def _launched(self, kind: str, processes: int, slow: bool) -> Launch:
        asked = [each for each, count in self.chosen if count == processes and each.slow is slow and not each.missing()]
        jobs = [self._job(each, processes, kind) for each in sorted(asked, key=str)]
        root = self.factory.mktemp("programs") / f"{kind}{processes}"
        for job in [each for each in jobs if Path(each.script).parent != OURS]:  # those make what they need
            place = root / job.name / "data"
            place.mkdir(parents=True)
            for name in ("MNIST", "wikitext-2.txt"):
                (place / name).symlink_to(self.data / name)
            shutil.copy(self.data / lightning_data.ARCHIVE, place)  # its program removes it
        return launch(kind, processes, jobs, root, "lightning", timeout=300 + 200 * len(jobs))

    def _job(self, program: LightningProgram, processes: int, kind: str) -> Job:
        own = [] if program.checkout else [str(processes)]
        arguments = [*own, *program.arguments, *(program.on_two if processes == 2 else ())]
        variables = {
            "COMPAT_TRAINER": json.dumps(program.trainer(processes)),
            "COMPAT_PACKAGE": program.package,
            "COMPAT_AVERAGES_LATE": "1" if program.unfreezes and kind == "original" else "",
            **({"TORCH_HOME": str(self.data / "torch")} if program.checkout else {}),
            # Lightning itself does not read checkpoints with a program's own classes among the hyper-parameters.
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        }
        return Job(
            program.name,
            str(program.found(self.copied)),
            arguments,
            variables,
            path=[APART],
            before="beside_lightning.py",
            timeout=300,
        )

    def _copied(self, checkout: str) -> Path:
        """A copy of a checkout, in which its programs find their data."""
        place = self.factory.mktemp(checkout.lower())
        parts = ["examples"] if checkout == EXAMPLES else ["src", "configs", ".project-root"]
        for part in parts:
            source = Path(os.environ[checkout], part)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, place / part)
        (place / "examples" / "Datasets" if checkout == EXAMPLES else place / "data").symlink_to(self.data)
        return place

    @property
    def data(self) -> Path:
        """The folder of all data."""
        folder = self.factory.getbasetemp() / "data"
        if not folder.exists():
            lightning_data.digits(folder)
            lightning_data.text(folder)
            lightning_data.cats_and_dogs(folder)
            if any(program.name == "transfer_learning" for program, _ in self.chosen):
                lightning_data.weights(folder / "torch")
        return folder

    def compare(self, program: LightningProgram, processes: int) -> None:
        """Assert that a program computes what it computes under Lightning."""
        sides: dict[str, dict[str, float]] = {}
        for kind in ("original", "ours"):
            launched = self.launched(kind, processes, program.slow)
            launched.passed(program.name)
            results = [f"{program.name}.json{suffix}" for suffix in ("", ".1")[:processes]]
            sides[kind] = merged([json.loads((launched.root / each).read_text()) for each in results])
        assert len(sides["original"]) > 5, sides["original"]
        assert any("loss" in name for name in sides["original"])
        assert furthest(sides["original"], sides["ours"]) <= TOLERANCE


def merged(ranks: list[dict[str, float]]) -> dict[str, float]:
    """What all ranks have recorded, by name."""
    found: dict[str, float] = {}
    for rank, values in enumerate(ranks):
        for name, value in values.items():
            if name.split()[1] in OVER_RANKS:
                found[name] = found.get(name, 0.0) + value / len(ranks)
            else:
                found[f"{name} of {rank}"] = value
    return found


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The launches of this session."""
    return Runs(request, tmp_path_factory)


def cases() -> list[Any]:
    """Each program on each number of processes."""
    found = []
    for program in PROGRAMS:
        for processes in (1,) if program.alone else (1, 2):
            marks = [pytest.mark.slow] if program.slow else []
            found.append(pytest.param(program, processes, marks=marks, id=f"{program}-{processes}"))
    return found


@pytest.mark.compat
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("program", "processes"), cases())
def test_a_program_computes_what_it_computes_under_lightning(
    program: LightningProgram, processes: int, runs: Runs
) -> None:
    missing = program.missing()
    if missing:
        pytest.skip(missing)
    runs.compare(program, processes)


def test_the_page_lists_the_programs() -> None:
    page = PAGE.read_text()
    assert page == written(page, table(), PART), "run `python -m tests.compat.lightning_programs`"
