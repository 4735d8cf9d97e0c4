"""SwanLabLogger with the real package, offline: what its logs of records hold is what was logged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain import SwanLabLogger
from tests.pool import run_in_processes
from tests.trackers.package_contract import Found, Kit, PackageContract
from tests.trackers.runs import PICTURE, PLANTED, SCRIPT, TEXT, complaint, pretend

pytestmark = pytest.mark.trackers

QUICK = {"probe": {"requirements": False, "hardware": False, "monitor": False}}
"""Without the list of packages, for which SwanLab calls pip."""


def make(place: Path, **options: Any) -> SwanLabLogger:
    return SwanLabLogger("digits", "first", mode="offline", save_dir=place, settings=QUICK, **options)


def init_kwargs(place: Path) -> Mapping[str, Any]:
    return {"mode": "offline", "save_dir": str(place), "settings": QUICK}


def records(path: Path) -> Iterator[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    reader.open(path)
    for data in reader:
        record = Record()
        record.ParseFromString(data)
        yield record
    reader.close()


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        value = value["value"] if isinstance(value, dict) and "value" in value and "sort" in value else value
        found.update(flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value})
    return found


def read(place: Path, run_id: str) -> Found:
    found = Found()
    for directory in sorted((place / "swanlog").glob(f"run-*{run_id}*" if run_id else "run-*")):
        [log] = directory.glob("*.swanlab")
        for record in records(log):
            kind = next(field.name for field, _ in record.ListFields() if field.name not in ("num", "timestamp"))
            if kind == "scalar":
                found.values[record.scalar.key, record.scalar.step] = record.scalar.value.number
            elif kind == "media":
                add_media(found, directory / "media", record.media)
            elif kind == "save" and record.save.name != "config":
                found.files.add(Path(record.save.name).name)
            elif kind == "finish":
                state, error = record.finish.state, record.finish.error
        config = yaml.safe_load((directory / "files" / "config.yaml").read_text())
        found.parameters.update(flat(config))
        found.status, found.error = found.parameters["status"], found.parameters.get("error", "")
        assert error == found.error
        assert state in (1, 2)
    found.files = {name for name in found.files if not name.startswith(("requirements", "metadata", "conda"))}
    return found


def add_media(found: Found, media: Path, record: Any) -> None:
    from PIL import Image

    short = record.key.removeprefix("run-")
    [item] = record.value.items
    [path] = media.rglob(item.filename) if item.filename else [None]
    if short == "picture":
        assert record.step == 2
        pixels = Image.open(path).convert("RGB")
        assert pixels.getpixel((7, 5)) == tuple(int(each * 255 + 0.5) for each in PICTURE[:, 5, 7])
        found.media.add("images")
    elif short == "sample":
        assert path.read_text() in ("some text", TEXT)
        found.media.add("texts")
    elif short == "table":
        assert '"a"' in path.read_text()
        found.media.add("tables")
    elif short == "weights":
        found.media.add("histograms")


class TestSwanLabLogger(PackageContract):
    kit = Kit("swanlab", make, read, init_kwargs, "log")


def failing_script(directory: Path) -> bool:
    """A script of a raw loop that an error with a secret ends."""
    import sys

    pretend(SCRIPT)
    hook = sys.excepthook
    logger = make(directory)
    logger.log({"loss": 1.0}, 1)
    assert logger.tracker.alive
    is_ours = sys.excepthook is hook
    logger.finalize("failed", f"ValueError: {PLANTED[:0]}first line")
    return is_ours


def test_the_traceback_of_an_error_is_left_to_drivetrain(tmp_path: Path) -> None:
    assert run_in_processes(failing_script, 1, args=(tmp_path,)) == [True]
    found = read(tmp_path, "")
    assert (found.status, found.error) == ("failed", "ValueError: first line")


def complaint_of(options: dict[str, Any]) -> tuple[str, int]:
    return complaint(SwanLabLogger("digits", mode="online", **options))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "has no API key. Set SWANLAB_API_KEY or run `swanlab login`."),
        (PLANTED, "cannot connect to 127.0.0.1 (Connection refused)."),
    ],
)
def test_one_that_cannot_start_names_why_and_the_run_continues(key: str | None, message: str, tmp_path: Path) -> None:
    env = {"SWANLAB_API_KEY": key, "SWANLAB_API_HOST": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    [(line, lost)] = run_in_processes(complaint_of, 1, args=({"save_dir": tmp_path},), env=env)
    assert message in line
    assert "mode='offline'" in line
    assert PLANTED not in line
    assert lost == 3
