"""The mark of a process that the others can do without."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore

from drivetrain import WorkQueue
from drivetrain.runtime.heartbeat import ERROR_FILE_VARIABLE, has_left_queue, is_expendable, set_expendable


def raised_in_a_queue() -> BaseException:
    try:
        with WorkQueue([1], HashStore(), 0, 2):
            raise MemoryError
    except MemoryError as error:
        return error


def test_the_mark_is_there_while_a_process_takes_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    error_file = str(tmp_path / "error.json")
    monkeypatch.setenv(ERROR_FILE_VARIABLE, error_file)
    assert not is_expendable(error_file)
    with WorkQueue([1], HashStore(), 0, 2):
        assert is_expendable(error_file)
    assert not is_expendable(error_file)
    raised_in_a_queue()  # and caught: the process continues, and the others may wait for it
    assert not is_expendable(error_file)


def test_a_process_that_is_alone_is_never_expendable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(tmp_path / "error.json"))
    with WorkQueue([1], HashStore(), 0, 1):
        assert not is_expendable(str(tmp_path / "error.json"))


def test_an_error_that_follows_from_one_in_a_queue_is_known():
    following = ValueError("what the script made of it")
    following.__cause__ = raised_in_a_queue()
    assert has_left_queue(following)
    assert has_left_queue(following.__cause__)
    assert not has_left_queue(ValueError())
    assert not has_left_queue(None)


def test_without_a_launcher_no_mark_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ERROR_FILE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    set_expendable(True)
    assert list(tmp_path.iterdir()) == []
