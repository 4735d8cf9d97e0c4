"""WandbLogger with the real package, offline: what its transaction logs hold is what was logged."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, WandbLogger
from tests.pool import run_in_processes
from tests.trackers.package_contract import Found, Kit, PackageContract
from tests.trackers.runs import PICTURE, PLANTED, SCRIPT, TEXT, complaint, pretend

pytestmark = pytest.mark.trackers

AXIS = "trainer/global_step"


def make(place: Path, **options: Any) -> WandbLogger:
    return WandbLogger(project="digits", save_dir=place, offline=True, settings={"api_key": PLANTED * 2}, **options)


def init_kwargs(place: Path) -> Mapping[str, Any]:
    return {"mode": "offline", "dir": str(place)}


def records(path: Path) -> Iterator[Any]:
    """The records of a transaction log: chunks with a header of 7 bytes in blocks of 32 KiB, as in LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the last chunk
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def items(entries: Any) -> dict[str, Any]:
    """Names and values of a record's items."""
    found: dict[str, Any] = {}
    for each in entries:
        *path, last = each.nested_key or [each.key]
        inner = found
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = json.loads(each.value_json)
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value})
    return found


def read(place: Path, run_id: str) -> Found:
    found = Found()
    for path in sorted(place.glob(f"wandb/offline-run-*-{run_id or '*'}/*.wandb")):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                add(found, items(record.history.item), path.parent / "files")
            elif kind == "config":
                found.parameters.update(flat(items(record.config.update)))
            elif kind == "run":
                found.parameters.update(flat(items(record.run.config.update)))
            elif kind == "summary":
                summary = items(record.summary.update)
                found.status, found.error = summary.get("status", found.status), summary.get("error", found.error)
            elif kind == "artifact" and record.artifact.type == "model":
                found.files |= {Path(entry.path).name for entry in record.artifact.manifest.contents}
    return found


def add(found: Found, row: dict[str, Any], files: Path) -> None:
    from PIL import Image

    step = row.get(AXIS, -1)
    for name, value in row.items():
        short = name.removeprefix("run-")
        if isinstance(value, (int, float)) and name != AXIS and not name.startswith("_"):
            found.values[name, step] = value
        elif isinstance(value, str) and (short, step) in (("sample", 2), ("sample", 3)):
            assert value in ("some text", TEXT)
            found.media.add("texts")
        elif isinstance(value, dict) and value.get("_type") == "images/separated":
            [file] = value["filenames"]
            pixels = Image.open(files / file).convert("RGB")
            assert (pixels.size, step, short) == ((8, 6), 2, "picture")
            assert pixels.getpixel((7, 5)) == tuple(int(each * 255 + 0.5) for each in PICTURE[:, 5, 7])
            found.media.add("images")
        elif isinstance(value, dict) and value.get("_type") == "table-file":
            table = json.loads((files / value["path"]).read_text())
            assert (table["columns"], table["data"]) == (["a", "b"], [[1, 2], [3, 4]])
            found.media.add("tables")
        elif isinstance(value, dict) and value.get("_type") == "histogram":
            assert sum(value["values"]) == 10
            found.media.add("histograms")


class TestWandbLogger(PackageContract):
    kit = Kit("wandb", make, read, init_kwargs, "log", env={"WANDB_API_KEY": PLANTED * 2})

    def test_each_part_of_a_run_has_a_directory_with_its_id(self, runs: list[dict[str, Any]], directory: Path) -> None:
        found = list((directory / "fit" / "wandb").glob("offline-run-*"))
        assert len(found) == 3
        assert all(path.name.endswith(runs[0]["ids"][0]) for path in found)

    def test_a_script_that_holds_a_secret_is_not_recorded(self, runs: list[dict[str, Any]], directory: Path) -> None:
        [failed] = (directory / "failed" / "wandb").glob("offline-run-*")
        assert not list(failed.rglob("wandb-metadata.json"))
        assert list((directory / "fit").rglob("wandb-metadata.json")) or list((directory / "fit").rglob("*.wandb"))


def late_values(directory: Path) -> tuple[str, int, bool]:
    """A run that the script has opened, whose values come out of order."""
    pretend(SCRIPT)
    import wandb

    run = wandb.init(project="own", dir=directory, mode="offline")
    logger = WandbLogger()
    for step in (5, 3, 3, 9):
        logger.log({"loss": float(step), "epoch": 1}, step)
    logger.finish()
    is_open = wandb.run is run
    run.finish()
    return logger.version, logger.lost, is_open


def test_a_run_of_the_scripts_own_is_used_and_left_open_and_earlier_steps_are_kept(tmp_path: Path) -> None:
    [(run_id, lost, is_open)] = run_in_processes(late_values, 1, args=(tmp_path,))
    found = read(tmp_path, run_id)
    assert {key: value for key, value in found.values.items() if key[0] == "loss"} == {
        ("loss", step): float(step) for step in (3, 5, 9)
    }
    assert (lost, is_open) == (0, True)


def complaint_of(options: dict[str, Any]) -> tuple[str, int]:
    return complaint(WandbLogger(**options))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "has no API key. Set WANDB_API_KEY or run `wandb login`."),
        (PLANTED * 2, "cannot connect to 127.0.0.1 (Connection refused)."),
    ],
)
def test_one_that_cannot_start_names_why_and_the_run_continues(key: str | None, message: str, tmp_path: Path) -> None:
    env = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": key, "HOME": str(tmp_path), "WANDB_MODE": None}
    [(line, lost)] = run_in_processes(complaint_of, 1, args=({"save_dir": tmp_path},), env=env)
    assert message in line
    assert "offline=True" in line
    assert PLANTED not in line
    assert lost == 3


def test_what_is_wrong_with_the_arguments_is_raised_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match=r"add_file_policy='copy'.*'immutable'"):
        WandbLogger(add_file_policy="copy")
    assert WandbLogger(log_model="all").log_model is True
    assert "stores only the best checkpoint" in caplog.text
