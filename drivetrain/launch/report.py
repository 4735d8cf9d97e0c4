"""Failure reports: the record that a rank writes, and the message that the launcher prints.

The record has the layout of torch elastic's error files, so that other tools can read it. Additional fields contain
precise times, since elastic's whole seconds are too coarse to order failures.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile

from drivetrain.runtime.errors import in_package, in_torch, is_library, shown_path
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from drivetrain.runtime.heartbeat import ERROR_FILE_VARIABLE as ERROR_FILE_VARIABLE
from drivetrain.runtime.terminal import flush_output, print_text

INTERRUPTED = "interrupted: waiting for the processes to exit. Press Ctrl-C again to kill them."
LOST_AFTER = 30.0  # seconds without a sign of life after which a machine counts as lost
_OWN_FIELDS = "drivetrain"

_LIKELY_CAUSES = {
    "SIGKILL": "Most likely the system ran out of memory (see `dmesg`). Other causes: `kill -9`, a scheduler's limit.",
    "SIGSEGV": "It crashed in native code: a compiled extension, or incompatible libraries. "
    "The Python stack, if it could be written, is above.",
    "SIGBUS": "Most likely shared memory ran out: enlarge /dev/shm, or use fewer loader workers.",
    "SIGABRT": "Native code aborted (an assertion, a CUDA error, a collective's time-out). Its message is above.",
    "SIGILL": "A library was built for another processor.",
    "SIGFPE": "Native code divided by zero.",
    "SIGTERM": "It was asked to stop, by `kill` or a scheduler.",
    "SIGINT": "Only this process was interrupted.",
}

COMPARE_CALLS = (
    "All processes must call the same collectives in the same order, with the same shapes. Run "
    "`drivetrain launch --debug` to get an error at the first call that differs."
)


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank: exit code, time and traceback.

    Attributes:
        rank: Global rank.
        local_rank: Rank on its machine.
        pid: Process id on its machine.
        exit_code: Exit code as in `subprocess`: negative for a signal.
        timestamp: Seconds since the epoch at which the rank raised or was last seen alive.
        text: Traceback, the message passed to `sys.exit`, or the state of all ranks for a hang. Empty if unknown.
        host: Name of its machine.
        hung: True if the launcher terminated the rank because the run made no progress.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    timestamp: float
    text: str = ""
    host: str = ""
    hung: bool = False

    @property
    def status(self) -> int:
        # as in a shell: 128 plus the number of a fatal signal
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankFailure:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class FailureRecord:
    """Error report that a failing rank writes to a file for the launcher.

    Attributes:
        text: Traceback, or the message passed to `sys.exit`.
        timestamp: Seconds since the epoch.
        exit_code: Intended exit code. The process may have been killed in its exit handlers.
        final: True if the rank certainly exits. A script that writes elastic's own record may continue.
    """

    text: str
    timestamp: float
    exit_code: int = 1
    final: bool = False


def write_record(path: str, text: str, summary: str, exit_code: int = 1) -> None:
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    own = {"timestamp": now, "exit_code": exit_code}
    content = {"message": {"message": summary, "extraInfo": extra}, _OWN_FIELDS: own}
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(temporary, path)


def read_record(path: str) -> FailureRecord | None:
    """Read the error report of a rank, or return None if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        message = content["message"]
        if isinstance(message, str):
            return FailureRecord(message, float(content.get("timestamp", 0)))
        extra = message["extraInfo"]
        if (own := content.get(_OWN_FIELDS)) is None:
            return FailureRecord(extra["py_callstack"], float(extra["timestamp"]))
        return FailureRecord(extra["py_callstack"], own["timestamp"], own["exit_code"], final=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    return min(failures, key=lambda failure: failure.timestamp)


def describe(failure: RankFailure, world_size: int, *, then: str = "", advise: bool = True, debug: bool = False) -> str:
    """Return the error message for a failed rank, with its cause, machine and traceback.

    `then` states what happens next, by default that the others were stopped. With `advise`, a fatal signal gets its
    likely causes. With `debug`, calls are compared already, so this is not suggested.
    """
    peers = world_size - 1
    stopped = f" The other {peers} processes were stopped." if peers > 1 else " The other process was stopped."
    if failure.hung:
        return f"drivetrain: {failure.text}\n{then}".rstrip()
    then = f" {then}" if then else stopped if peers else ""
    where = f"pid {failure.pid} on {failure.host or socket.gethostname()}"
    if failure.exit_code < 0:
        number = -failure.exit_code
        name = next((each.name for each in signal.Signals if each == number), "unknown")
        cause = _LIKELY_CAUSES.get(name, "") if advise else ""
        if cause and name == "SIGABRT" and peers and not debug:
            cause = f"{cause}\n{COMPARE_CALLS}"
        line = f"rank {failure.rank} ({where}) was killed by signal {number} ({name}).{then}"
        return f"drivetrain: {line}\n{cause}".rstrip()
    if failure.status == 128 + signal.SIGINT and not failure.text:
        return f"drivetrain: rank {failure.rank} ({where}) was interrupted (KeyboardInterrupt).{then}"
    line = f"drivetrain: rank {failure.rank} ({where}) failed with exit code {failure.exit_code}.{then}"
    return f"{line}\n{failure.text}".rstrip()


def write(text: str) -> None:
    flush_output()
    print_text(text, file=sys.stderr)


def announce(text: str) -> None:
    write(text if text.startswith("drivetrain: ") else f"drivetrain: {text}")


def resumable(what: str = "the run was preempted and has saved its state") -> int:
    announce(f"{what}: start it again to resume (exit code {RESUME_EXIT_CODE}).")
    return RESUME_EXIT_CODE


def announce_restart(failure: RankFailure | None, world_size: int, number: int, most: int) -> None:
    count = f" (restart {number} of {most})" if number else ""
    then = f"Starting all processes again{count}."
    if failure is None:
        announce(f"a machine gave no sign of life for {LOST_AFTER:g} s. {then}")
    elif failure.exit_code == RESUME_EXIT_CODE:
        announce(f"the run was preempted and has saved its state. {then}")
    else:
        write(describe(failure, world_size, then=then, advise=False))


def exit_code_after(
    received: signal.Signals,
    *,
    overdue: Sequence[int],
    grace_period: float,
    preempted: bool,
    succeeded: bool,
    described: str,
) -> int:
    if overdue:
        ranks = ", ".join(str(rank) for rank in overdue)
        announce(
            f"rank {ranks} had not exited {grace_period:g} s after {received.name} and was killed. Allow more time "
            "with --preemption_grace_period."
        )
    if preempted:
        return resumable()
    if received == signal.SIGUSR1 and succeeded:
        return 0
    if described:
        write(described)
    return 128 + received


# Stacks of ranks


_FRAME = re.compile(r'^  File "(?P<filename>.*)", line (?P<line>\d+) in (?P<function>.*)$')


# Modules of drivetrain/runtime that wait for other processes.
_WAITING_FILES = {"collectives.py", "collective_checks.py", "process_group.py", "store_barrier.py"}
_UNNAMED = ("_", "<", "wrapper")


@dataclass(frozen=True)
class Frame:
    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.filename, self.line).strip()
        text = f"{shown_path(self.filename)}:{self.line} in {self.function}"
        return f"{text}: {source}" if source else text


@dataclass(frozen=True)
class Stack:
    """Stack trace of a rank's main thread, which shows where the rank hangs."""

    frames: tuple[Frame, ...]

    @classmethod
    def parse(cls, text: str) -> Stack | None:
        frames: list[Frame] = []
        for line in text.splitlines():
            if line.startswith(("Stack ", "Current thread ", "Thread ")):
                frames = []
            elif match := _FRAME.match(line):
                frames.append(Frame(match["filename"], int(match["line"]), match["function"]))
        return cls(tuple(frames)) if frames else None

    @property
    def user_frame(self) -> Frame:
        # Frames are in order from the innermost one.
        return next((frame for frame in self.frames if not is_library(frame.filename)), self.frames[0])

    @property
    def collective(self) -> str | None:
        inside = list(takewhile(lambda frame: is_library(frame.filename), self.frames))
        ours = [frame for frame in inside if in_package(frame.filename, "runtime")]
        torchs = [frame for frame in inside if in_torch(frame.filename, "distributed")]
        if torchs or any(os.path.basename(frame.filename) in _WAITING_FILES for frame in ours):
            # The outermost function is the one that the user called: `gather`, not its internal parts.
            named = [frame.function for frame in (*torchs, *ours) if not frame.function.startswith(_UNNAMED)]
            return named[-1] if named else inside[-1].function
        if inside and in_torch(inside[0].filename, os.path.join("nn", "parallel", "distributed.py")):
            return inside[0].function
        # Gradients are reduced inside the backward pass, which has no Python frames.
        return "backward" if any(in_torch(frame.filename, "autograd") for frame in inside) else None

    def __str__(self) -> str:
        return "\n".join(f"    {frame}" for frame in reversed(self.frames))
