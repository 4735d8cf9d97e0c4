"""One at a time holds the lock of a file: by `flock`, or by a locked byte where there is none."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import types
from pathlib import Path

import pytest

from drivetrain.trackers import index
from drivetrain.trackers.index import locked


class Windows(types.ModuleType):
    """Stands for `msvcrt`: locks a byte where a file stands, and refuses what is locked at once."""

    LK_UNLCK, LK_NBLCK = 0, 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.calls: list[tuple[int, int]] = []

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        self.calls.append((mode, os.lseek(descriptor, 0, os.SEEK_CUR)))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN if mode == self.LK_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error


@pytest.fixture(params=["flock", "a locked byte"])
def msvcrt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Windows:
    stand_in = Windows()
    if request.param != "flock":
        monkeypatch.setattr(index, "fcntl", None)
        monkeypatch.setitem(sys.modules, "msvcrt", stand_in)
    return stand_in


def test_a_lock_is_waited_for_and_given_back(msvcrt: Windows, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, 1.0), pytest.raises(TimeoutError, match=r"was locked by another run for 0 s"), locked(path, 0.05):
        pytest.fail("two have it")
    with pytest.raises(KeyError), locked(path, 0.05):
        raise KeyError
    with locked(path, 0.05):
        pass
    if index.fcntl is None:
        assert [mode for mode, _ in msvcrt.calls].count(Windows.LK_UNLCK) == 3
        assert {place for _, place in msvcrt.calls} == {0}


def test_a_process_that_was_started_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, 1.0):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with locked(path, 0.05):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
