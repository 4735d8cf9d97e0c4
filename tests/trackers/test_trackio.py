"""TrackioLogger with the real package and a local database: what it holds is what was logged."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import TrackioLogger
from tests.pool import run_in_processes
from tests.trackers.package_contract import Found, Kit, PackageContract
from tests.trackers.runs import PICTURE, SCRIPT, TEXT, complaint, pretend

pytestmark = pytest.mark.trackers


def make(place: Path, **options: Any) -> TrackioLogger:
    return TrackioLogger("digits", save_dir=place, auto_log_cpu=False, **options)


def init_kwargs(place: Path) -> Mapping[str, Any]:
    return {"save_dir": str(place), "auto_log_cpu": False}


def read(place: Path, run_id: str) -> Found:
    home = place.parent / "trackio"
    found = Found()
    with sqlite3.connect(home / ("digits.db" if run_id else "raw.db")) as database:
        names = {name for (name,) in database.execute("SELECT run_name FROM metrics")}
        assert len(names) == 1 or run_id in names
        wanted = run_id or names.pop()
        for step, metrics in database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (wanted,)):
            for name, value in json.loads(metrics).items():
                if isinstance(value, (int, float)):
                    found.values[name, step] = value
                else:
                    add_media(found, home, name.removeprefix("run-"), step, value)
        [(config,)] = database.execute("SELECT config FROM configs WHERE run_name = ?", (wanted,))
        found.parameters = json.loads(config)
    found.status, found.error = found.parameters["status"], found.parameters.get("error", "")
    if (home / "artifacts").is_dir():
        manifests = artifact_files(home, wanted)
        found.files = {Path(path).name for path in manifests}
    return found


def artifact_files(home: Path, run_name: str) -> list[str]:
    """The paths within the artifacts of a run."""
    with sqlite3.connect(home / "digits.db") as database:
        rows = database.execute(
            "SELECT manifest FROM artifact_versions WHERE producer_run_name = ?", (run_name,)
        ).fetchall()
    return [entry["path"] for (manifest,) in rows for entry in json.loads(manifest)]


def add_media(found: Found, home: Path, short: str, step: int, value: Any) -> None:
    from PIL import Image

    kind = value["_type"]
    if kind == "trackio.image":
        pixels = Image.open(home / "media" / value["file_path"]).convert("RGB")
        assert (short, step) == ("picture", 2)
        assert pixels.getpixel((7, 5)) == tuple(int(each * 255 + 0.5) for each in PICTURE[:, 5, 7])
        found.media.add("images")
    elif kind == "trackio.table":
        assert value["_value"] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        found.media.add("tables")
    elif kind == "trackio.histogram":
        assert sum(value["values"]) == 10
        found.media.add("histograms")
    elif kind == "trackio.markdown":
        assert value["_value"] in ("some text", TEXT)
        found.media.add("texts")


class TestTrackioLogger(PackageContract):
    kit = Kit("trackio", make, read, init_kwargs, "log", env={"TRACKIO_DIR": "<here>/trackio"})


def short_run(directory: Path) -> str | None:
    pretend(SCRIPT, TRACKIO_DIR=str(directory / "trackio"))
    logger = make(directory / "run")
    logger.log_hyperparams({"lr": 0.1})
    logger.log({"loss": 1.0}, 1)
    logger.log_hyperparams({"depth": 2})
    logger.log({"loss": 0.5}, 2)
    logger.finish()
    return logger.version


def test_a_configuration_is_whole_however_quickly_its_parts_follow(tmp_path: Path) -> None:
    [run_id] = run_in_processes(short_run, 1, args=(tmp_path,))
    found = read(tmp_path / "run", str(run_id)).parameters
    assert {name: found[name] for name in ("lr", "depth", "status")} == {"lr": 0.1, "depth": 2, "status": "completed"}


def complaint_of(options: dict[str, Any]) -> tuple[str, int]:
    return complaint(TrackioLogger("digits", **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space_id": "me/space"}, "has no token for its Space. Set HF_TOKEN or run `hf auth login`."),
        (
            {"server_url": "http://127.0.0.1:9/?write_token=planted-key-0123456789"},
            "cannot connect to 127.0.0.1 (Connection refused).",
        ),
    ],
)
def test_one_that_cannot_start_names_why_and_the_run_continues(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    env = {"HF_HOME": str(tmp_path), "HF_TOKEN": None, "TRACKIO_DIR": str(tmp_path / "trackio")}
    [(line, lost)] = run_in_processes(complaint_of, 1, args=(options,), env=env)
    assert message in line
    assert "planted" not in line
    assert lost == 3
