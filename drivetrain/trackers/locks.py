"""A lock among processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], seconds: float) -> Iterator[None]:
    """Hold the lock of a file, which other processes and other threads wait for.

    Args:
        path: The file; it is made, and stays.
        seconds: How long to wait.

    Raises:
        TimeoutError: Another run held it all the time.
    """
    import fcntl

    deadline = time.monotonic() + seconds
    with open(path, "a", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} was locked by another run for {seconds:.0f} s") from None
                time.sleep(0.01)
        yield
