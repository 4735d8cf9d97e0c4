from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivetrain import CheckpointError, ConfigurationError
from drivetrain.trackers import (
    CSVLogger,
    GeneralTracker,
    TensorBoardLogger,
    Tracker,
    TrackerGroup,
    on_main_process,
)


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
        "Direct: OSError: disk full The run continues without these values.",
        "Direct lost 3 of 3 values: 3 by OSError: disk full.",
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
    with pytest.raises(ConfigurationError, match=r"no tracker 'wandb' in this run. Its trackers: 'csv'"):
        TrackerGroup([table], is_main=True).get("wandb")


def test_a_general_tracker_names_what_its_class_lacks() -> None:
    class Bare(GeneralTracker):
        name = "bare"

    with pytest.raises(ConfigurationError, match="Bare has no requires_logging_directory, tracker"):
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
    monkeypatch.setattr("drivetrain.trackers.base.PartialState.existing", classmethod(lambda cls: None))
    assert Own().rank() is None


ODD_VALUES = {
    "tensor": torch.ones(2),
    "array": np.ones(2),
    "empty": torch.ones(0),
    "list": [1, 2],
    "object": object(),
    "none": None,
    "complex": torch.tensor(1j),
}


def test_a_value_without_a_place_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it is, and wherever it stands among the values of a call; a dict of numbers has a place."""
    table, board = CSVLogger(tmp_path, "table"), TensorBoardLogger(tmp_path, "board")
    group = TrackerGroup([table, board], is_main=True)
    values = {"first": 1.0, **ODD_VALUES, "pair": {"a": 2.0, "b": {"c": 3}}, "last": 4.0}
    for step in range(2):
        group.log(values, step)
    group.finalize()
    rows = list(csv.DictReader((Path(table.log_dir) / "metrics.csv").open()))
    numbers = [{"first": "1.0", "pair/a": "2.0", "pair/b/c": "3", "last": "4.0"}.items() <= row.items() for row in rows]
    assert numbers == [True, True]
    assert not {"tensor", "array", "empty"} & set(rows[0])
    read = [EventAccumulator(str(path)).Reload() for path in Path(board.log_dir).rglob("") if path.is_dir()]
    found = [(tag, [event.value for event in each.Scalars(tag)]) for each in read for tag in each.Tags()["scalars"]]
    assert sorted(found) == [("first", [1, 1]), ("last", [4, 4]), ("pair", [2, 2]), ("pair", [3, 3])]
    warnings = [line for line in caplog.messages if "does not support" in line]
    assert len(warnings) == len(set(warnings)) == 3 + len(ODD_VALUES)


def test_curves_that_share_a_chart_end_where_the_resumed_run_begins(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path)
    board.log({"pair": {"a": 1.0, "b": 2.0}}, 0)
    state = board.state_dict()
    board.log({"pair": {"a": 7.0, "b": 8.0}}, 1)
    board.finish()
    resumed = TensorBoardLogger(tmp_path)
    resumed.load_state_dict(state)
    resumed.log({"pair": {"a": 3.0, "b": 4.0}}, 1)
    resumed.finish()
    for curve, values in (("a", [1, 3]), ("b", [2, 4])):
        read = EventAccumulator(str(Path(board.log_dir, f"pair_{curve}"))).Reload()
        assert [event.value for event in read.Scalars("pair")] == values
