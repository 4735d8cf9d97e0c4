from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError
from drivetrain.trackers import (
    ClearMLLogger,
    CometLogger,
    CSVLogger,
    TensorBoardLogger,
    Tracker,
    available_trackers,
    register_tracker,
    registry,
    resolve_trackers,
)


class ListTracker(Tracker):
    name = "list"

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.rows.append((None, dict(values)))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.rows.append((step, dict(values)))


@pytest.fixture
def registered() -> Iterator[type[ListTracker]]:
    yield register_tracker(ListTracker)
    del registry.TRACKERS["list"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, []),
        (False, []),
        ([], []),
        (True, [CSVLogger]),
        ("csv", [CSVLogger]),
        ("tensorboard", [TensorBoardLogger]),
        (["tensorboard", "csv"], [TensorBoardLogger, CSVLogger]),
        ("all", [CSVLogger, TensorBoardLogger, CometLogger, ClearMLLogger]),
        (["comet_ml", "clearml", "comet"], [CometLogger, ClearMLLogger]),
        (("csv", ListTracker()), [CSVLogger, ListTracker]),
    ],
)
def test_names_and_objects_become_trackers(spec: Any, expected: list[type[Tracker]], tmp_path: Path) -> None:
    assert [type(tracker) for tracker in resolve_trackers(spec, save_dir=tmp_path)] == expected


def test_trackers_given_as_objects_are_used_as_they_are(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="mine")
    assert resolve_trackers(logger) == [logger]


def test_all_files_of_a_run_lie_in_one_directory(tmp_path: Path) -> None:
    for version in range(2):
        table, board = resolve_trackers([CSVLogger(tmp_path), "tensorboard"], save_dir=tmp_path)
        for tracker in (table, board):
            tracker.log({"loss": 1.0}, 1)
            tracker.finish()
        assert table.log_dir == board.log_dir == str(tmp_path / "drivetrain_logs" / f"version_{version}")
        assert len(list(Path(table.log_dir).iterdir())) == 2


def test_trackers_of_different_experiments_or_given_versions_stay_apart(tmp_path: Path) -> None:
    given = CSVLogger(tmp_path, version=4)
    other = CSVLogger(tmp_path, name="other")
    free = CSVLogger(tmp_path)
    resolve_trackers([given, other, free])
    assert [Path(tracker.log_dir).relative_to(tmp_path).as_posix() for tracker in (given, other, free)] == [
        "drivetrain_logs/version_4",
        "other/version_0",
        "drivetrain_logs/version_0",
    ]


def test_arguments_reach_trackers_given_by_name(registered: type[ListTracker], tmp_path: Path) -> None:
    made = resolve_trackers(
        ["list", "csv"],
        save_dir=tmp_path,
        name="exp",
        init_kwargs={"list": {"size": 3}, "csv": {"version": 2}},
    )
    assert isinstance(made[0], ListTracker)
    assert made[0].size == 3
    assert made[1].log_dir == str(tmp_path / "exp" / "version_2")


def test_the_place_and_the_project_may_be_among_the_arguments_of_one_tracker(tmp_path: Path) -> None:
    (table,) = resolve_trackers(
        "csv", save_dir="other", name="other", init_kwargs={"csv": {"save_dir": tmp_path, "project": "exp"}}
    )
    assert table.log_dir == str(tmp_path / "exp" / "version_0")


def test_a_registered_tracker_is_known_by_name(registered: type[ListTracker]) -> None:
    assert "list" in available_trackers()
    (tracker,) = resolve_trackers("list")
    assert isinstance(tracker, ListTracker)


def test_the_words_of_lightning_lead_to_the_same_methods() -> None:
    tracker = ListTracker()
    tracker.log_hyperparams({"lr": 0.1})
    tracker.log_metrics({"loss": 1.0}, step=3)
    assert tracker.experiment is tracker.tracker is tracker
    tracker.finalize("success")
    assert tracker.rows == [(None, {"lr": 0.1}), (3, {"loss": 1.0})]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "tensorbord",
            r"no tracker 'tensorbord'. Did you mean 'tensorboard'\? Known trackers: 'csv', 'tensorboard'",
        ),
        (["csv", 3], "3 is not a tracker. Pass a Tracker object, or one of the names"),
    ],
)
def test_an_unknown_tracker_is_refused_and_the_known_ones_named(spec: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_trackers(spec)


@pytest.mark.parametrize("name", ["comet", "clearml", "wandb", "mlflow", "aim", "dvclive", "trackio", "swanlab"])
def test_a_package_that_is_not_installed_is_named_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert name not in available_trackers()
    with pytest.raises(ConfigurationError, match=rf"pip install 'drivetrain\[{name}\]'"):
        resolve_trackers(name)


def test_a_name_in_use_cannot_be_registered_again() -> None:
    class Other(ListTracker):
        name = "csv"

    with pytest.raises(ConfigurationError, match="'csv' belongs to CSVLogger"):
        register_tracker(Other)
    assert isinstance(resolve_trackers("csv")[0], CSVLogger)


def test_a_class_without_a_name_cannot_be_registered() -> None:
    class Nameless(Tracker):
        def store_init_configuration(self, values: Mapping[str, Any]) -> None: ...

        def log(self, values: Mapping[str, Any], step: int | None = None) -> None: ...

    with pytest.raises(ConfigurationError, match="has no `name`"):
        register_tracker(Nameless)
