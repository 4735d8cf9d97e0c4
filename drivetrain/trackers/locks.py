"""A lock among processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from typing import IO, Any

# Not by name: each has a type only on the systems that have it.
try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], seconds: float) -> Iterator[None]:
    """Hold the lock of a file, which other processes and other threads wait for.

    Args:
        path: The file; it is made, and stays.
        seconds: How long to wait.

    Raises:
        TimeoutError: Another run held it all the time.
    """
    deadline = time.monotonic() + seconds
    with open(path, "a", encoding="utf-8") as file:
        while not _takes(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} was locked by another run for {seconds:.0f} s")
            time.sleep(0.01)
        try:
            yield
        finally:
            _give_back(file)


def _takes(file: IO[str]) -> bool:
    """Take the lock of an open file, unless it is taken."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _lock_first_byte(file, "LK_NBLCK")
    except (BlockingIOError, PermissionError):
        return False
    return True


def _give_back(file: IO[str]) -> None:
    """Give the lock back, before the file is closed: a fork may have the file too, and Windows takes its time."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)
    else:
        _lock_first_byte(file, "LK_UNLCK")


def _lock_first_byte(file: IO[str], mode: str) -> None:
    msvcrt: Any = importlib.import_module("msvcrt")
    file.seek(0)  # what is locked begins where the file stands
    msvcrt.locking(file.fileno(), getattr(msvcrt, mode), 1)
