from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from drivetrain import CSVLogger
from drivetrain.trackers import index
from drivetrain.trackers.index import command, record_run
from tests.pool import run_in_processes


def lines(directory: Path) -> list[list[str]]:
    """The lines of an index, as when, where and command."""
    title, *rest = (directory / "drivetrain_logs" / "index").read_text().splitlines()
    assert title.startswith("#")
    return [line.split("  ") for line in rest]


def test_each_run_has_a_line_with_its_folder_and_command_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(["drivetrain_logs", "drivetrain_logs", "digits"]):
        monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "train.py", "--note", f"run {number}"])
        logger = CSVLogger(tmp_path, name)
        logger.log_hyperparams({"lr": 0.1})
        logger.log({"loss": 1.0}, 1)
        logger.finish()
        logger.log({"loss": 1.0}, 2)  # the same run
        logger.finish()
    found = lines(tmp_path)
    assert [each[1:] for each in found] == [
        ["../digits/version_0", "python train.py --note 'run 2'"],
        ["version_1", "python train.py --note 'run 1'"],
        ["version_0", "python train.py --note 'run 0'"],
    ]
    assert all(len(when) == len("2026-01-31 12:00:00") for when, *_ in found)


def test_a_resumed_run_has_a_further_line_for_its_folder(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path)
    first.log({"loss": 1.0}, 1)
    state = first.state_dict()
    first.finish()
    again = CSVLogger(tmp_path)
    again.load_state_dict(state)
    again.log({"loss": 1.0}, 2)
    again.finish()
    assert [each[1] for each in lines(tmp_path)] == ["version_0", "version_0"]


def record_many(directory: Path, count: int) -> None:
    import torch.distributed

    from drivetrain import PartialState

    rank = PartialState().process_index
    torch.distributed.barrier()
    threads = [
        threading.Thread(target=record_run, args=(directory, directory / f"{rank}-{number}")) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_runs_that_begin_at_once_lose_no_line(tmp_path: Path) -> None:
    run_in_processes(record_many, 3, args=(tmp_path, 15), timeout=60)
    found = {each[1] for each in lines(tmp_path)}
    assert found == {f"../{rank}-{number}" for rank in range(3) for number in range(15)}
    assert {path.name for path in (tmp_path / "drivetrain_logs").iterdir()} == {"index", ".index.lock"}


def test_a_command_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["python", "-m", "train", "--api_key", "planted", "--hf-token=planted", "--lr=0.1", "--url", "u:given@host"]
    monkeypatch.setattr(sys, "orig_argv", given)
    assert command(["given"]) == (
        "python -m train --api_key <hidden> '--hf-token=<hidden>' --lr=0.1 --url 'u:<hidden>@host'"
    )


def test_a_place_where_nothing_can_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "drivetrain_logs").write_text("a file")
    record_run(tmp_path, tmp_path / "run")
    assert "is not listed in" in caplog.text


def test_an_index_that_another_run_keeps_locked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fcntl

    monkeypatch.setattr(index, "LOCK_SECONDS", 0.05)
    record_run(tmp_path, tmp_path / "run")
    with (tmp_path / "drivetrain_logs" / ".index.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        record_run(tmp_path, tmp_path / "other")
    assert "locked by another run" in caplog.text
    assert [each[1] for each in lines(tmp_path)] == ["../run"]


def test_an_address_is_shown_as_it_is(tmp_path: Path) -> None:
    record_run(tmp_path, "https://host/project/1")
    assert lines(tmp_path)[0][1] == "https://host/project/1"
