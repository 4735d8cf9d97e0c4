"""Heartbeats that a launcher reads to detect and end a run that hangs.

Each rank memory-maps a small file that its launcher created and counts its progress in it. Counting is a memory store
per collective, optimizer step and batch, without a system call. The launcher sends `STACK_SIGNAL` to a rank that makes
no progress. `faulthandler` then writes the rank's stack, even if the interpreter is blocked.

This module imports nothing from torch, because every rank imports it before the script starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from datetime import timedelta

HEARTBEAT_VARIABLE = "DRIVETRAIN_HEARTBEAT"
# Scripts and schedulers rarely use this real-time signal. Systems without them use SIGUSR1; Windows has neither (0).
STACK_SIGNAL: int = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGUSR2", 0)

_PID, _BEATS, _ATTACHED, _TIMEOUT_MS = range(4)
_BYTES = 4 * 8
_COUNTS_CPU_TIME, _COUNTS_BEATS_ONLY = 1, 2


class Heartbeat:
    """Counter of a rank's progress, by which its launcher detects a hang."""

    __slots__ = ("_cells", "watched")

    def __init__(self, cells: MutableSequence[int] | None = None, watched: bool = False) -> None:
        self._cells = cells if cells is not None else [0, 0, 0, 0]
        self.watched = watched

    @classmethod
    def attach(cls) -> Heartbeat:
        path = os.environ.get(HEARTBEAT_VARIABLE)
        if not path:
            # No launcher follows this process, so its counter is private.
            return cls()
        try:
            with open(path, "r+b") as file:
                cells = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("Q")
        except (OSError, ValueError):
            return cls()
        # A child process of a rank inherits the variable and must not count for the rank.
        return cls(cells, watched=True) if cells[_PID] == os.getpid() else cls()  # type: ignore[arg-type]

    def beat(self) -> None:
        self._cells[_BEATS] += 1

    def beating(self, function: Callable[[], int]) -> Callable[[], int]:
        if not self.watched:
            return function

        def counted() -> int:
            self.beat()
            return function()

        return counted

    def describe_waits(self, timeout: timedelta | None, *, spinning: bool) -> None:
        self._cells[_TIMEOUT_MS] = int(timeout.total_seconds() * 1000) if timeout is not None else 0
        # A wait that uses CPU time must not count as progress.
        self._cells[_ATTACHED] = _COUNTS_BEATS_ONLY if spinning else _COUNTS_CPU_TIME


@dataclass(frozen=True)
class Sign:
    """Progress report of one rank, which the launcher reads to detect processes that hang.

    Attributes:
        beats: Number of units of progress so far.
        counts_cpu_time: True if CPU time of the main thread is a sign of progress too.
        timeout: Timeout of collectives in seconds, or None if unknown.
    """

    beats: int
    counts_cpu_time: bool
    timeout: float | None


def answer_launcher() -> None:
    """Start reporting this process's progress to the launcher, and dump the stack when the launcher asks."""
    path = os.environ.get(HEARTBEAT_VARIABLE)
    if not path:
        return
    try:
        stacks = open(f"{path}.stack", "ab")  # faulthandler writes to it until the process ends
        # Only the main thread: reading the stacks of running threads is not safe.
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
        # Write all bytes now: a later store to a page without disk space would kill the process.
        with open(path, "wb") as file:
            file.write(os.getpid().to_bytes(8, "little") + bytes(_BYTES - 8))
    except (OSError, ValueError, AttributeError):
        pass  # disk full, or a system without these signals: the run is not watched


def read_sign(path: str, pid: int) -> Sign | None:
    try:
        with open(path, "rb") as file:
            content = file.read(_BYTES)
    except OSError:
        return None
    if len(content) < _BYTES:
        return None
    cells = [int.from_bytes(content[start : start + 8], "little") for start in range(0, _BYTES, 8)]
    # This process has not written any progress yet.
    if cells[_PID] != pid:
        return None
    # Zero means that the timeout is unknown.
    timeout = cells[_TIMEOUT_MS] / 1000 or None
    return Sign(cells[_BEATS], cells[_ATTACHED] != _COUNTS_BEATS_ONLY, timeout)


# Processes that a run can do without, such as those that take items from a work queue


ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file for a process's failure; the marker file is next to it."""

_LEFT_A_QUEUE = "_drivetrain_left_work_queue"


def set_expendable(expendable: bool) -> None:
    """Tell the launcher whether the run can continue without this process if the process dies."""
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if not error_file:
        return
    with contextlib.suppress(OSError):
        if expendable:
            open(_mark(error_file), "wb").close()
        else:
            os.unlink(_mark(error_file))


def is_expendable(error_file: str) -> bool:
    # The run continues without a process whose error file has this mark.
    return os.path.exists(_mark(error_file))


def mark_left_queue(error: BaseException) -> None:
    setattr(error, _LEFT_A_QUEUE, True)


def has_left_queue(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        # Raised while the process worked on an item of a `WorkQueue`.
        if hasattr(error, _LEFT_A_QUEUE):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _mark(error_file: str) -> str:
    return f"{error_file}.expendable"
