"""The signs of progress that a rank leaves for its launcher, which ends a run in which there are none.

Each rank maps a small file that the launcher named and counts in it: one store to memory for each collective,
optimizer step and batch, no system call. The launcher reads the count, and asks a rank that stands still for its
stack with `STACK_SIGNAL`, which `faulthandler` answers even where Python cannot run.

Imports nothing of torch: each rank passes through here before its script runs.
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
# A real-time signal, which scripts and schedulers rarely use, where the system has them; 0 on Windows, unused.
STACK_SIGNAL: int = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGUSR2", 0)

_PID, _BEATS, _ATTACHED, _TIMEOUT_MS = range(4)
_BYTES = 4 * 8
_COUNTS_CPU_TIME, _COUNTS_BEATS_ONLY = 1, 2


class Heartbeat:
    """Counts what a rank gets done."""

    __slots__ = ("_cells", "watched")

    def __init__(self, cells: MutableSequence[int] | None = None, watched: bool = False) -> None:
        self._cells = cells if cells is not None else [0, 0, 0, 0]
        self.watched = watched

    @classmethod
    def attach(cls) -> Heartbeat:
        """Count for the launcher that started this very process, or where no launcher reads it."""
        path = os.environ.get(HEARTBEAT_VARIABLE)
        if not path:
            return cls()
        try:
            with open(path, "r+b") as file:
                cells = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("Q")
        except (OSError, ValueError):
            return cls()
        # A process that a rank has started inherits the variable, and must not count for the rank.
        return cls(cells, watched=True) if cells[_PID] == os.getpid() else cls()  # type: ignore[arg-type]

    def beat(self) -> None:
        """Record that something was done."""
        self._cells[_BEATS] += 1

    def beating(self, function: Callable[[], int]) -> Callable[[], int]:
        """Return a function that beats and calls this one; the function itself where no launcher reads the count."""
        if not self.watched:
            return function

        def counted() -> int:
            self.beat()
            return function()

        return counted

    def describe_waits(self, timeout: timedelta | None, *, spinning: bool) -> None:
        """Record how this rank waits for others."""
        self._cells[_TIMEOUT_MS] = int(timeout.total_seconds() * 1000) if timeout is not None else 0
        self._cells[_ATTACHED] = _COUNTS_BEATS_ONLY if spinning else _COUNTS_CPU_TIME


@dataclass(frozen=True)
class Sign:
    """What a launcher reads of a rank.

    Attributes:
        beats: How much it has got done.
        counts_cpu_time: Whether CPU time of its main thread is a sign of progress too.
        timeout: Seconds that its collectives may wait; None if not known.
    """

    beats: int
    counts_cpu_time: bool
    timeout: float | None


def answer_launcher() -> None:
    """Make this process's heartbeat, and let it write its stack when the launcher asks.

    The worker calls this before the script runs; nothing happens where no launcher has named a file.
    """
    path = os.environ.get(HEARTBEAT_VARIABLE)
    if not path:
        return
    try:
        stacks = open(f"{path}.stack", "ab")  # faulthandler writes to it until the process ends
        # The main thread alone: the stacks of running threads cannot be read safely.
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
        # Written in full, since a store to a page for which there is no room kills the process.
        with open(path, "wb") as file:
            file.write(os.getpid().to_bytes(8, "little") + bytes(_BYTES - 8))
    except (OSError, ValueError, AttributeError):
        pass  # no room, or a system without these signals: the run is not watched


def read_sign(path: str, pid: int) -> Sign | None:
    """Read a rank's heartbeat; None where this process has left none."""
    try:
        with open(path, "rb") as file:
            content = file.read(_BYTES)
    except OSError:
        return None
    if len(content) < _BYTES:
        return None
    cells = [int.from_bytes(content[start : start + 8], "little") for start in range(0, _BYTES, 8)]
    if cells[_PID] != pid:
        return None
    timeout = cells[_TIMEOUT_MS] / 1000 or None
    return Sign(cells[_BEATS], cells[_ATTACHED] != _COUNTS_BEATS_ONLY, timeout)


# The mark of a process that the others of its run can do without: one that takes items from a work queue


ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file in which a process leaves its failure for its launcher; the mark is beside it."""

_LEFT_A_QUEUE = "_drivetrain_left_work_queue"


def set_expendable(expendable: bool) -> None:
    """Leave the mark, or take it away; does nothing where no launcher reads it."""
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if not error_file:
        return
    with contextlib.suppress(OSError):
        if expendable:
            open(_mark(error_file), "wb").close()
        else:
            os.unlink(_mark(error_file))


def is_expendable(error_file: str) -> bool:
    """Whether a process has left the mark."""
    return os.path.exists(_mark(error_file))


def mark_left_queue(error: BaseException) -> None:
    """Mark an exception as one that ended this process's part of a work queue."""
    setattr(error, _LEFT_A_QUEUE, True)


def has_left_queue(error: BaseException | None) -> bool:
    """Whether an exception, or one that it follows from, ended this process's part of a work queue."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if hasattr(error, _LEFT_A_QUEUE):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _mark(error_file: str) -> str:
    return f"{error_file}.expendable"
