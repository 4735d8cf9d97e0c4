from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.trackers import CSVLogger, GeneralTracker, Tracker, TrackerGroup, on_main_process


class Direct(Tracker):
    """Keeps what it is given, on the thread of the caller."""

    name = "direct"
    in_background = False

    def __init__(self, fails: BaseException | None = None) -> None:
        self.fails = fails
        self.given: list[Any] = []

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.given.append(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.given.append((dict(values), step, options))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise CheckpointError("no run writes this")


class Slow(Direct):
    name = "slow"
    in_background = True


class Everywhere(Direct):
    name = "everywhere"
    main_process_only = False


def test_one_tracker_that_raises_leaves_the_run_and_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    broken, fine = Direct(OSError("disk full")), Direct()
    group = TrackerGroup([broken, fine], is_main=True)
    for step in range(3):
        group.log({"loss": 0.5}, step)
    group.finalize()
    assert fine.given == [({"loss": 0.5}, step, {}) for step in range(3)]
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == [
        "Direct: OSError: disk full The run continues; what is lost is counted.",
        "Direct has lost 3 of 3 values: 3 by OSError: disk full.",
    ]


def test_on_other_processes_only_those_are_called_that_ask_for_it() -> None:
    trackers = [Direct(), Everywhere()]
    group = TrackerGroup(trackers, is_main=False)
    assert group.writes_here
    group.log({"loss": 0.5}, 1)
    assert [len(tracker.given) for tracker in trackers] == [0, 1]
    assert not TrackerGroup([Direct()], is_main=False).writes_here
    assert group.state() == []


def test_options_reach_the_tracker_that_they_name() -> None:
    first, second = Direct(), Slow()
    group = TrackerGroup([first, second], is_main=True)
    group.log({"loss": 0.5}, 1, {"slow": {"tag": "x"}})
    group.finalize()
    assert first.given == [({"loss": 0.5}, 1, {})]
    assert second.given == [({"loss": 0.5}, 1, {"tag": "x"})]


def test_a_state_that_no_run_writes_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no run writes this"):
        TrackerGroup([Direct()], is_main=True).load_state([{"x": 1}])


def test_a_tracker_is_found_by_its_name_and_does_nothing_on_other_processes(tmp_path: Path) -> None:
    table = CSVLogger(tmp_path)
    assert TrackerGroup([table], is_main=True).get("csv") is table
    absent = TrackerGroup([table], is_main=False).get("csv")
    absent.log({"loss": 1.0}, 1)
    absent.tracker.anything.at_all(1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match="no tracker 'wandb' in this run, which has: 'csv'"):
        TrackerGroup([table], is_main=True).get("wandb")


def test_a_general_tracker_names_what_its_class_lacks() -> None:
    class Bare(GeneralTracker):
        name = "bare"

    with pytest.raises(ConfigurationError, match="Bare lacks requires_logging_directory, tracker"):
        Bare()
    Bare(_blank=True)


def test_a_decorated_method_runs_on_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(GeneralTracker):
        name = "own"
        requires_logging_directory = False
        tracker = None  # type: ignore[assignment]

        @on_main_process
        def rank(self) -> str:
            return "here"

    assert Own().rank() == "here"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("drivetrain.trackers.general.PartialState.existing", classmethod(lambda cls: None))
    assert Own().rank() is None
