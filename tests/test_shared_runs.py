"""Runs share their processes until one fails; then each has processes of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pool import ProcessesFailed
from tests.shared_runs import SharedRuns

runs = SharedRuns(__name__, timeout=60)


@runs
def ranks() -> tuple[int, int]:
    return int(os.environ["RANK"]), os.getppid()


@runs
def writes(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / os.environ["RANK"]).write_text("written")


@runs
def fails() -> None:
    raise ValueError("as it should")


def test_each_run_returns_what_every_rank_saw() -> None:
    assert [rank for rank, _ in runs.of(ranks)] == [0, 1]


def test_a_run_has_a_directory_of_its_own() -> None:
    runs.of(writes)
    assert sorted(path.name for path in runs.directory_of(writes).iterdir()) == ["0", "1"]


def test_a_run_that_fails_fails_alone() -> None:
    with pytest.raises(ProcessesFailed, match="as it should"):
        runs.of(fails)
    assert len(runs.of(ranks)) == 2
