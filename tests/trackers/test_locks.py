"""One at a time holds the lock of a file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from drivetrain.trackers.index import locked


def test_a_lock_is_waited_for_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, 1.0), pytest.raises(TimeoutError, match=r"was locked by another run for 0 s"), locked(path, 0.05):
        pytest.fail("two have it")
    with pytest.raises(KeyError), locked(path, 0.05):
        raise KeyError
    with locked(path, 0.05):
        pass


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
