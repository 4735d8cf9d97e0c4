"""Programs written for Lightning, once under Lightning and once under ours: what they compute is the same."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drivetrain.compat.lightning.version import VERSION
from tests.compat.lightning_cases import HOOKS, PAGE, PROGRAM, TOLERANCE, UNLIKE, content, recorded_runs, tasks
from tests.compat.pages import written
from tests.compat.running import furthest
from tests.pool import DEVICE, ROOT, device

RUN = ROOT / "tests" / "simulated" / "run.py"
OURS = ["-m", "drivetrain", "launch", "--num_processes", "1", "--as", "lightning"]
OURS += ["--cpu"] if device() == "cpu" else [str(RUN)]


def report(script: Path, root: Path, start: list[str], **variables: str) -> dict[str, Any]:
    """What a program writes; all of one side runs in one process, which imports only once."""
    root.mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COMPAT_DEVICE": device(), **variables}
    command = [sys.executable, *start, str(script), str(root / "report.json")]
    ran = subprocess.run(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    return json.loads((root / "report.json").read_text())


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both sides report of a program, each run once."""
    assert importlib.metadata.version("lightning") == VERSION

    @cache
    def run(script: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        root = tmp_path_factory.mktemp(script.stem)
        return report(script, root / "original", [], **{DEVICE: "cpu"}), report(script, root / "ours", OURS)

    return run


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", tasks())
def test_a_task_computes_what_it_computes_under_lightning(task: str, sides: Any) -> None:
    theirs, ours = (side[task] for side in sides(PROGRAM))
    assert isinstance(theirs, dict), f"the original: {theirs}"
    assert isinstance(ours, dict), f"ours: {ours}"
    assert furthest(theirs, ours) <= TOLERANCE


def unlike(sides: Any, run: str) -> list[str]:
    """The events that one side alone has: Lightning's after "- ", ours after "+ "."""
    theirs, ours = (side[run] for side in sides(HOOKS))
    assert len(theirs) > 80, theirs[-1]
    return [line for line in difflib.ndiff(theirs, ours) if line.startswith(("- ", "+ "))]


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", recorded_runs())
def test_hooks_are_called_in_the_order_that_lightning_calls_them_in(run: str, sides: Any) -> None:
    known = UNLIKE.get(run, {})
    assert [line for line in unlike(sides, run) if not any(fnmatchcase(line, each) for each in known)] == []


@pytest.mark.compat
@pytest.mark.timeout(900)
def test_every_hook_that_lightning_has_is_recorded(sides: Any) -> None:
    theirs, _ = sides(HOOKS)
    assert theirs["unrecorded"] == []


@pytest.mark.compat
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", UNLIKE)
def test_every_difference_that_is_listed_is_there(run: str, sides: Any) -> None:
    lines = unlike(sides, run)
    assert [each for each in UNLIKE[run] if not any(fnmatchcase(line, each) for line in lines)] == []


def test_the_page_lists_the_tasks() -> None:
    page = PAGE.read_text()
    assert page == written(page, content()), "run `python -m tests.compat.lightning_cases`"
    assert len(tasks()) == 13
