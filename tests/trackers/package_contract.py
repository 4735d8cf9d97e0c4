"""What every tracker over a package must do, against the real package, read back from the files that it leaves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointError
from tests.pool import run_in_processes
from tests.trackers.runs import (
    HERE,
    PLANTED,
    SCRIPT,
    Failing,
    files_with,
    fit,
    log_media,
    pretend,
    raw_loop,
    secrets,
)


@dataclass
class Found:
    """What a package holds of one run, all parts of it together."""

    values: dict[tuple[str, int], float] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    error: str = ""
    texts: dict[str, Any] = field(default_factory=dict)
    media: set[str] = field(default_factory=set)
    """Which of `images`, `tables`, `histograms` and `texts` are there, each with the right content."""
    files: set[str] = field(default_factory=set)
    """The names of the files of the best checkpoint."""


@dataclass(frozen=True)
class Kit:
    """How a package is used and read in tests; all functions are those of a module.

    Attributes:
        name: The tracker's.
        make: Makes a tracker that writes below a directory, with further arguments.
        read: What is there of the run with an ID.
        init_kwargs: What the raw Accelerator gets for it.
        writes: The method of the raw object that writes values.
        media: Which media it keeps.
        dropped: Which of them a resume drops that came after the checkpoint.
        keeps_files: Whether it keeps the best checkpoint.
        env: Environment variables, also for its secrets.
    """

    name: str
    make: Callable[..., Any]
    read: Callable[[Path, str], Found]
    init_kwargs: Callable[[Path], Mapping[str, Any]]
    writes: str
    media: frozenset[str] = frozenset({"images", "tables", "histograms", "texts"})
    dropped: frozenset[str] = frozenset()
    keeps_files: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "run-"


def begin(kit: Kit, directory: Path) -> None:
    """Let this process be that of a script, in a directory of its own."""
    os.chdir(directory)  # not that of a repository, in which some packages write
    pretend(
        SCRIPT,
        SOME_SERVICE_API_KEY=PLANTED,
        **{name: value.replace("<here>", str(directory)) for name, value in kit.env.items()},
    )


def fits(kit: Kit, directory: Path) -> dict[str, Any]:
    """A fit, more of the same run, its resumption, and a fit that fails."""
    begin(kit, directory)
    logger = kit.make(directory / "fit", prefix="run", log_model=kit.keeps_files)
    trainer, logged = fit(directory / "run", logger)
    best = {path.name for path in Path(trainer.checkpoint_callbacks[0].best_model_path).rglob("*") if path.is_file()}
    log_media(logger)
    logger.finish()
    again = kit.make(directory / "fit", prefix="run")
    _, resumed = fit(directory / "run", again, max_epochs=3, resume="auto")
    pretend(HERE)
    failed = kit.make(directory / "failed")
    with pytest.raises(ValueError, match="no more"):
        fit(directory / "failing", failed, Failing(**secrets()), enable_checkpointing=False)
    return {
        "ids": (logger.version, again.version, failed.version),
        "lost": logger.lost + again.lost + failed.lost,
        "logged": logged.values,
        "epochs": logged.epochs,
        "resumed": resumed.values,
        "best": best,
    }


def raw_runs(kit: Kit, directory: Path) -> dict[tuple[str, int], float]:
    begin(kit, directory)
    return raw_loop(directory, kit.name, kit.init_kwargs(directory / "raw"), with_media=True)


def resumed_raw_runs(kit: Kit, directory: Path) -> dict[tuple[str, int], float]:
    begin(kit, directory)
    return raw_loop(directory, kit.name, kit.init_kwargs(directory / "raw"), resume=str(directory / "state"))


def hostile_run(kit: Kit, directory: Path) -> dict[str, Any]:
    """A tracker whose package raises in the middle, and is then slow."""
    begin(kit, directory)
    logger = kit.make(directory / "hostile")
    logger.load()
    logger.log({"loss": 1.0}, 0)
    raw = logger.tracker
    write = getattr(raw, kit.writes)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError(f"no space left for {PLANTED}")

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return write(*args, **kwargs)

    setattr(raw, kit.writes, broken)
    logger.log({"loss": 2.0}, 1)
    logger.log({"loss": 3.0}, 2)
    assert logger._calls.drain(30.0)
    setattr(raw, kit.writes, slow)
    began = time.monotonic()
    for step in range(3, 7):
        logger.log({"loss": float(step)}, step)
    waited = time.monotonic() - began
    logger.finish()
    return {"id": logger.version, "lost": logger.lost, "waited": waited}


class PackageContract:
    """The tests; a subclass has the `kit`."""

    kit: Kit

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp(cls.kit.name)

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, directory: Path) -> list[dict[str, Any]]:
        return run_in_processes(fits, 2, args=(cls.kit, directory), timeout=200)

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, runs: list[dict[str, Any]], directory: Path) -> Found:
        return cls.kit.read(directory / "fit", runs[0]["ids"][0])

    @pytest.fixture(scope="class")
    @classmethod
    def raw(cls, directory: Path) -> list[Any]:
        first = run_in_processes(raw_runs, 2, args=(cls.kit, directory), timeout=150)
        return [first, run_in_processes(resumed_raw_runs, 2, args=(cls.kit, directory), timeout=150)]

    def test_a_fit_on_two_processes_and_its_resumption_are_one_run_that_equals_what_was_logged(
        self, runs: list[dict[str, Any]], run: Found
    ) -> None:
        logged = {**runs[0]["logged"], **runs[0]["resumed"]}
        assert len(runs[0]["logged"]) >= 8
        assert runs[0]["resumed"]
        assert {(name, step): value for (name, step), value in run.values.items() if name != "epoch"} == {
            (self.kit.prefix + name, step): value for (name, step), value in logged.items()
        }
        steps = {step: epoch for (_, step), epoch in runs[0]["epochs"].items()}
        assert {step: run.values["epoch", step] for step in steps} == steps
        assert runs[1]["logged"] == {}
        first, again, failed = runs[0]["ids"]
        assert first == again != failed
        assert runs[0]["lost"] == 0
        assert run.status == "completed"

    def test_parameters_are_there_without_secrets(self, run: Found) -> None:
        shown = {name: str(run.parameters[name]) for name in ("lr", "width", "token", "nested/api_key")}
        assert shown == {"lr": "0.05", "width": "4", "token": "<hidden>", "nested/api_key": "<hidden>"}

    def test_media_are_there_as_they_were_logged(self, run: Found) -> None:
        assert run.media == self.kit.media - self.kit.dropped

    def test_the_best_checkpoint_is_kept(self, runs: list[dict[str, Any]], run: Found) -> None:
        assert "MANIFEST.json" in runs[0]["best"]
        assert run.files == (runs[0]["best"] if self.kit.keeps_files else set())

    def test_a_fit_that_fails_says_so_with_the_first_line_of_the_error(
        self, runs: list[dict[str, Any]], directory: Path
    ) -> None:
        failed = self.kit.read(directory / "failed", runs[0]["ids"][2])
        assert (failed.status, failed.error) == ("failed", "ValueError: no more of <hidden>")

    def test_a_raw_loop_on_two_processes_is_written_once_and_resumed_in_place(
        self, raw: list[Any], directory: Path
    ) -> None:
        found = self.kit.read(directory / "raw", "")
        (logged, other), (resumed, _) = raw
        assert found.values == {**logged, **resumed}
        assert other == {}
        assert found.status == "completed"
        assert found.media == self.kit.media - {"histograms"}

    def test_no_planted_secret_is_in_anything_that_was_written(
        self, runs: list[dict[str, Any]], raw: list[Any], directory: Path
    ) -> None:
        assert list(directory.rglob("MANIFEST.json"))
        assert files_with(PLANTED, directory) == []

    def test_runs_are_listed_in_the_index_once_each_time_that_they_are_opened(
        self, runs: list[dict[str, Any]], raw: list[Any], directory: Path
    ) -> None:
        found = [
            line for path in directory.rglob("drivetrain_logs/index") for line in path.read_text().splitlines()[1:]
        ]
        assert len(found) == 6  # a fit, more of it, its resumption, one that fails, a raw loop and its resumption

    def test_a_package_that_raises_loses_those_values_and_a_slow_one_delays_no_step(self, directory: Path) -> None:
        [outcome] = run_in_processes(hostile_run, 1, args=(self.kit, directory), timeout=100)
        found = self.kit.read(directory / "hostile", outcome["id"])
        assert found.values == {("loss", 0): 1.0, **{("loss", step): float(step) for step in range(3, 7)}}
        assert outcome["lost"] == 2
        assert outcome["waited"] < 0.2

    def test_an_id_that_is_none_is_refused_and_a_given_one_is_kept(self, tmp_path: Path) -> None:
        logger = self.kit.make(tmp_path)
        with pytest.raises(CheckpointError, match="not a run ID"):
            logger.load_state_dict({"run_id": "../../etc"})
        logger.load_state_dict({"run_id": "0a1b2c3d4e5f"})
        assert logger.version == "0a1b2c3d4e5f"
        assert not list(tmp_path.iterdir())
