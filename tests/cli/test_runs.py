"""`drivetrain runs` and `drivetrain report`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError
from drivetrain.callbacks.report.record import write_record
from drivetrain.trackers.index import record_run
from tests.commands import drivetrain
from tests.trackers.test_report_page import run_in

RECORDS = "import json, os; json.dump([os.environ['DRIVETRAIN_RESUME'], os.getcwd()], open('resumed.json', 'w'))"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of two runs, the second of which has failed."""
    monkeypatch.chdir(tmp_path)
    for number, changed in ((0, {"name": "brave-otter-0"}), (1, {"state": "failed", "reason": "RuntimeError: no"})):
        folder = run_in(tmp_path / "drivetrain_logs" / f"version_{number}", **changed)
        record_run(tmp_path, folder)
    return tmp_path


def test_runs_are_listed_newest_first(directory: Path) -> None:
    title, *lines = drivetrain("runs").output.splitlines()
    assert title.split() == ["began", "run", "name", "state", "metric", "command"]
    assert [line.split()[2:7] for line in lines] == [
        ["version_1", "-", "failed", "val_loss", "1"],
        ["version_0", "brave-otter-0", "finished", "val_loss", "1"],
    ]
    listed = json.loads(drivetrain("runs", "--json").output)
    assert [(run["name"], run["state"], run["metric"]) for run in listed] == [
        ("version_1", "failed", "val_loss 1"),
        ("version_0", "finished", "val_loss 1"),
    ]


@pytest.mark.parametrize(
    ("best", "metrics", "shown"),
    [
        ({"monitor": "val_acc", "value": 0.75}, {"train_loss": 0.5}, "val_acc 0.75"),
        ({"monitor": "val_acc", "value": None}, {"train_loss": 0.5, "val_loss": 2.0}, "val_loss 2 (last)"),
        ({"monitor": None, "value": None}, {"epoch": 1.0, "acc": 0.5, "train_loss": 0.5}, "train_loss 0.5 (last)"),
        ({}, {"loss_of_the_head": 4.0}, "loss_of_the_head 4 (last)"),
        ({}, {"acc": 0.5}, "-"),
    ],
)
def test_a_value_that_is_not_the_best_is_listed_as_the_last(
    best: dict[str, object], metrics: dict[str, float], shown: str, directory: Path
) -> None:
    write_record(directory / "drivetrain_logs" / "version_1", {"state": "finished", "best": best, "metrics": metrics})
    assert f"  finished  {shown}  " in drivetrain("runs").output


MALFORMED: dict[str, Any] = {
    "text": "[",
    "a list": [],
    "nested without end": "[" * 100_000,
    "a number for metrics": {"metrics": 3},
    "text for a metric": {"metrics": {"val_loss": "low"}},
    "a list for best": {"best": [1]},
    "text for the time": {"started": "yesterday"},
    "a time beyond clocks": {"started": 1e300},
    "sessions without entries": {"sessions": [3]},
    "a process without a number": {"state": "running", "process": [1]},
    "a number for the reason": {"state": "failed", "reason": 4},
    "a number that no float holds": {"metrics": {"loss": 10**400}},
    "a number of 5000 digits": '{"progress": {"step": ' + "9" * 5000 + "}}",
    "warnings without parts": {"warnings": [1]},
    "warnings whose parts are text": {"warnings": [["x", "y", "z", "w"]]},
    "a commit that is a number": {"commit": {"id": 5, "branch": "main"}},
    "a value that is a list": {"best": {"monitor": "loss", "value": [1]}},
    "words that are numbers": {"argv": [1, 2]},
    "bytes": b"\xff\x00" * 50,
}


@pytest.mark.parametrize("record", MALFORMED.values(), ids=MALFORMED)
def test_a_record_that_cannot_be_read_is_listed_so_beside_the_others(record: Any, directory: Path) -> None:
    text = record if isinstance(record, str | bytes) else json.dumps(record)
    file = Path(directory, "drivetrain_logs", "version_1", "run.json")
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    _, broken, whole = drivetrain("runs").output.splitlines()
    assert "version_1  -              unreadable  run.json cannot be read: " in broken
    assert "version_0  brave-otter-0  finished" in whole
    assert "run.json cannot be read" in drivetrain("runs", "show", "version_1").output
    assert drivetrain("report", "drivetrain_logs/version_1").exit_code == 0


@pytest.mark.parametrize("kind", ["a file of gigabytes", "a pipe", "a directory"])
def test_what_is_no_record_is_not_waited_for(kind: str, directory: Path) -> None:
    file = Path(directory, "drivetrain_logs", "version_1", "run.json")
    file.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a directory":
        file.mkdir()
    else:
        with file.open("wb") as opened:
            opened.truncate(2**32)
    assert "version_1  -              unreadable" in drivetrain("runs").output


def test_the_page_spells_control_characters_and_markup_out(directory: Path) -> None:
    hostile = "\x1b[31m\u202e<script>alert(1)</script>"
    write_record(
        directory / "drivetrain_logs" / "version_1", {"state": "failed", "reason": hostile, "command": hostile}
    )
    drivetrain("report", "drivetrain_logs/version_1")
    page = (directory / "drivetrain_logs" / "version_1" / "report.html").read_text(encoding="utf-8")
    assert "\\x1b[31m\\u202e&lt;script&gt;alert(1)" in page
    assert not set(page) & set("\x1b\u202e")


def test_what_a_record_says_reaches_the_terminal_without_control_characters(directory: Path) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\u202eabc\x9b31m"
    folder = directory / "drivetrain_logs" / "version_1"
    record = {"state": "failed", "reason": hostile, "command": hostile, "hyper_parameters": {hostile: hostile}}
    write_record(folder, record)
    index = directory / "drivetrain_logs" / "index"
    index.write_text(index.read_text().replace("\n", f"{hostile}\n"))
    for shown in (drivetrain("runs").output, drivetrain("runs", "show", str(folder)).output):
        assert "\\x1b]0;owned\\x07" in shown
        assert not set(shown) & set("\x1b\x07\x9b\u202e")


def test_passwords_in_addresses_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--uri=https://me:pass1234@host/a?token=abcd&b=1"])
    record_run(tmp_path, "http://me:pass1234@tracking/run")
    text = Path(tmp_path, "drivetrain_logs", "index").read_text()
    assert "pass1234" not in text
    assert "abcd" not in text
    assert "https://me:<hidden>@host/a?token=<hidden>&b=1" in text


def test_a_directory_without_runs_is_explained(tmp_path: Path) -> None:
    assert "Give their folder with --dir" in drivetrain("runs", "--dir", str(tmp_path)).output


def test_a_run_is_found_by_its_name(directory: Path) -> None:
    assert "finished" in drivetrain("runs", "show", "brave-otter-0").output
    with pytest.raises(ConfigurationError, match="no run 'brave-otter-1'"):
        drivetrain("runs", "show", "brave-otter-1")


def test_a_run_is_shown(directory: Path) -> None:
    shown = drivetrain("runs", "show", "version_1").output
    for part in ("failed: RuntimeError: no", "30 steps, 3 epochs", "best.ckpt", "python train.py"):
        assert part in shown
    with pytest.raises(ConfigurationError, match="Did you mean 'version_1'"):
        drivetrain("runs", "show", "version_11")


def test_a_run_is_resumed_with_its_command_where_it_was_started(directory: Path) -> None:
    work = directory / "work"
    work.mkdir()
    argv = [sys.executable, "-c", RECORDS]
    folder = directory / "drivetrain_logs" / "version_0"
    record = {"state": "failed", "argv": argv, "cwd": str(work), "best": {"newest": "/runs/last.ckpt"}}
    write_record(folder, record)
    assert "/runs/last.ckpt" in drivetrain("runs", "resume", "version_0", "--dry-run").output
    assert not (work / "resumed.json").exists()
    drivetrain("runs", "resume", "version_0")
    assert json.loads((work / "resumed.json").read_text()) == ["/runs/last.ckpt", os.path.realpath(work)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"argv": None}, "not fully recorded.*DRIVETRAIN_RESUME=last.ckpt"),
        ({"best": {}}, "has no checkpoint"),
        ({"state": "running", "process": {"host": "elsewhere", "id": 3}, "due": 1e12}, "is running, as process 3"),
    ],
)
def test_what_cannot_be_resumed_is_refused(directory: Path, changed: dict[str, object], message: str) -> None:
    record = {"state": "failed", "argv": ["true"], "cwd": ".", "best": {"newest": "last.ckpt"}, **changed}
    write_record(directory / "drivetrain_logs" / "version_0", record)
    with pytest.raises(ConfigurationError, match=message):
        drivetrain("runs", "resume", "version_0")


def test_a_report_is_made_of_one_run_and_of_several(directory: Path) -> None:
    assert drivetrain("report", "version_0").output.strip().endswith("version_0/report.html")
    assert drivetrain("report", "version_0", "version_1").output.strip() == "comparison.html"
    assert "2 runs compared" in Path("comparison.html").read_text()
    drivetrain("report", "drivetrain_logs/version_0/metrics.csv", "-o", "one.html")
    assert "val_loss" in Path("one.html").read_text()
    with pytest.raises(ConfigurationError, match="neither a path nor a name"):
        drivetrain("report", "elsewhere")
