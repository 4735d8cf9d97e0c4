from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivetrain.launch.report import RankFailure, describe, first_failure, read_record, write_record


def failure(**changes: object) -> RankFailure:
    fields: dict[str, object] = {"rank": 1, "local_rank": 1, "pid": 7, "exit_code": 1, "timestamp": 1.0, "host": "box"}
    return RankFailure(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written_and_by_torchs_own_reader(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = str(tmp_path / "error.json")
    write_record(path, "Traceback …\nValueError: boom", "ValueError: boom", exit_code=3)
    record = read_record(path)
    assert record is not None
    assert (record.text, record.exit_code, record.final) == ("Traceback …\nValueError: boom", 3, True)
    theirs = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=path)
    assert theirs.timestamp == int(record.timestamp)
    assert theirs.message["message"] == "ValueError: boom"  # type: ignore[index]


def test_torchs_own_record_is_read_but_is_not_final(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "m", "extraInfo": {"py_callstack": "t", "timestamp": "12"}}}))
    record = read_record(str(path))
    assert record is not None
    assert (record.text, record.timestamp, record.final) == ("t", 12.0, False)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"message": 3}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "error.json"
    if content is not None:
        path.write_text(content)
    assert read_record(str(path)) is None


def test_the_earliest_failure_is_the_cause_within_a_second() -> None:
    assert first_failure([failure(rank=0, timestamp=1.2), failure(rank=3, timestamp=1.1)]).rank == 3


def test_a_failure_survives_the_way_to_another_machine() -> None:
    sent = failure(text="boom")
    assert RankFailure.from_json(sent.to_json()) == sent


@pytest.mark.parametrize(
    ("given", "world_size", "said"),
    [
        (failure(text="ValueError: boom"), 4, ["rank 1 (pid 7 on box)", "exit code 1", "other 3 processes", "boom"]),
        (failure(exit_code=-9), 2, ["signal 9 (SIGKILL)", "memory", "The other process was stopped."]),
        (failure(exit_code=-11), 1, ["SIGSEGV", "native code"]),
        (failure(exit_code=-7), 1, ["SIGBUS", "/dev/shm"]),
    ],
)
def test_the_description_names_rank_reason_and_what_became_of_the_others(
    given: RankFailure, world_size: int, said: list[str]
) -> None:
    text = describe(given, world_size)
    for part in said:
        assert part in text
    assert ("stopped" in text) == (world_size > 1)
