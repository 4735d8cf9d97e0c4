"""Watchdog that detects ranks without progress and reports where each rank of this machine waits.

A rank makes progress if it starts a collective, takes an optimizer step or gets a batch. It counts these in its
heartbeat file. CPU time of its main thread counts too, except on accelerators, where Python busy-waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

from drivetrain.launch.report import COMPARE_CALLS, RankFailure, Stack
from drivetrain.runtime.exit_codes import HANG_EXIT_CODE
from drivetrain.runtime.heartbeat import STACK_SIGNAL, Sign, read_sign

_LONGEST_INTERVAL = 1.0  # seconds between two readings
_LONGEST_PAUSE = 5.0  # maximum seconds to count between two polls, since the launcher itself may have been suspended
_ANSWER_TIME = 1.0  # seconds that ranks have to write their stacks
_POLL_INTERVAL = 0.02
_BUSY = 0.01  # minimum CPU share of a busy main thread
_CPU_NOISE = 0.05  # seconds of CPU time that do not count as progress
# Report a hang before torch raises because of its own time-out, unless that time-out is short.
BEFORE_TIMEOUT, _SHORTEST_TIMEOUT = 15.0, 60.0
_ALSO_COMPUTE = {"forward", "backward"}
_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}


@dataclass
class _Progress:
    pid: int
    path: str
    # the time of the last sign of progress
    since: float
    beats: int = -1
    cpu_time: float = 0.0
    sign: Sign | None = None

    def update(self, now: float) -> None:
        self.sign = read_sign(self.path, self.pid)
        # No heartbeat yet, for example because the script still imports modules.
        if self.sign is None:
            self.since = now
            return
        cpu_time = _main_thread_time(self.pid)
        used = cpu_time - self.cpu_time
        busy = self.sign.counts_cpu_time and used > _CPU_NOISE + _BUSY * (now - self.since)
        if self.sign.beats != self.beats or busy:
            self.beats, self.cpu_time, self.since = self.sign.beats, cpu_time, now


@dataclass(frozen=True)
class RankReport:
    rank: int
    pid: int
    status: str  # of the process, such as "sleeping" or "stopped"
    idle: float  # seconds without progress
    stack: Stack | None  # of the main thread, or None if the rank did not answer

    def describe(self, *, whole_stack: bool) -> str:
        who = f"  rank {self.rank} (pid {self.pid}, no progress for {self.idle:.0f} s)"
        if self.stack is None and self.status in _STOPPED:
            return f"{who} is stopped (SIGSTOP, Ctrl-Z or a debugger)"
        if self.stack is None:
            return f"{who} did not write its stack (its process is {self.status})"
        collective = self.stack.collective
        what = f"waits in {collective}" if collective else "is in no collective"
        text = f"{who} {what}\n    at {self.stack.user_frame}"
        return f"{text}\n{self.stack}" if whole_stack else text


@dataclass
class Watchdog:
    directory: str
    limit: float | None
    debug: bool = False
    _watched: dict[int, _Progress] = field(default_factory=dict)
    _global_ranks: dict[int, int] = field(default_factory=dict)
    _alone: bool = True
    _clock: float = 0.0
    _last_time: float = 0.0
    _next_poll: float = 0.0

    def path(self, local_rank: int) -> str:
        return os.path.join(self.directory, str(local_rank))

    def start(self, pids: dict[int, int], global_ranks: dict[int, int], world_size: int) -> None:
        self._alone = world_size < 2
        self._last_time = time.monotonic()
        self._global_ranks = global_ranks
        self._watched = {local: _Progress(pid, self.path(local), self._clock) for local, pid in pids.items()}

    def poll(self, alive: Iterable[int]) -> list[RankReport] | None:
        now = time.monotonic()
        if now < self._next_poll:
            return None
        self._next_poll = now + min(_LONGEST_INTERVAL, (self.limit or _LONGEST_INTERVAL) / 4)
        self._clock += min(now - self._last_time, _LONGEST_PAUSE)
        self._last_time = now
        ranks = [local for local in alive if local in self._watched]
        for local in ranks:
            self._watched[local].update(self._clock)
        overdue = [local for local in ranks if self._is_overdue(self._watched[local])]
        if not overdue:
            return None
        reports = self.report(ranks)
        if self.limit is None and not any(self._is_waiting(local, reports[ranks.index(local)]) for local in overdue):
            # Possibly a long computation or a read, so check again after the same time.
            for local in overdue:
                self._watched[local].since = self._clock
            return None
        return reports

    def report(self, alive: Iterable[int]) -> list[RankReport]:
        ranks = [local for local in alive if local in self._watched]
        stacks = self._ask_for_stacks(ranks)
        reports = []
        for local in ranks:
            progress = self._watched[local]
            idle = self._clock - progress.since
            reports.append(
                RankReport(self._global_ranks[local], progress.pid, _status(progress.pid), idle, stacks[local])
            )
        return reports

    def describe(self, reports: Iterable[RankReport]) -> str:
        return "\n".join(each.describe(whole_stack=self.debug) for each in reports)

    def failure(self, reports: list[RankReport], text: str) -> RankFailure:
        worst = max(reports, key=lambda report: report.idle)
        limit = f"--hang_timeout {self.limit:g}" if self.limit is not None else "the default of --hang_timeout"
        lines = [f"the run hangs: no progress for {worst.idle:.0f} s ({limit}). The processes were stopped.", text]
        if not self._alone and not self.debug and all(report.status not in _STOPPED for report in reports):
            lines.append(COMPARE_CALLS)
        local = next(local for local, rank in self._global_ranks.items() if rank == worst.rank)
        return RankFailure(
            rank=worst.rank,
            local_rank=local,
            pid=worst.pid,
            exit_code=HANG_EXIT_CODE,
            timestamp=time.time(),
            text="\n".join(lines),
            host=os.uname().nodename,
            hung=True,
        )

    def _is_waiting(self, local: int, report: RankReport) -> bool:
        collective = report.stack.collective if report.stack is not None else None
        sign = self._watched[local].sign
        # On accelerators, CPU time does not count, and a forward or backward may still be computing.
        return collective is not None and (bool(sign and sign.counts_cpu_time) or collective not in _ALSO_COMPUTE)

    def _is_overdue(self, progress: _Progress) -> bool:
        if progress.sign is None:
            return False
        limit = self.limit
        if limit is None:
            timeout = progress.sign.timeout
            if self._alone or timeout is None or timeout < _SHORTEST_TIMEOUT:
                return False
            limit = timeout - BEFORE_TIMEOUT
        return self._clock - progress.since >= limit

    def _ask_for_stacks(self, ranks: list[int]) -> dict[int, Stack | None]:
        starts: dict[int, int] = {}
        for local in ranks:
            progress = self._watched[local]
            if progress.sign and _catches(progress.pid, STACK_SIGNAL) and _status(progress.pid) not in _STOPPED:
                # Ranks append to this file, so a new stack begins at its current end.
                starts[local] = _size(f"{progress.path}.stack")
                try:
                    os.kill(progress.pid, STACK_SIGNAL)
                except ProcessLookupError:
                    del starts[local]
        deadline = time.monotonic() + _ANSWER_TIME
        sizes: dict[int, int] = {}
        while time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
            before, sizes = sizes, {local: _size(f"{self._watched[local].path}.stack") for local in starts}
            # Every rank has written something, and no file has grown since the last look.
            if sizes == before and all(size > starts[local] for local, size in sizes.items()):
                break
        return {local: self._read_stack(local, starts.get(local)) for local in ranks}

    def _read_stack(self, local: int, start: int | None) -> Stack | None:
        if start is None:
            return None
        try:
            with open(f"{self._watched[local].path}.stack", encoding="utf-8", errors="replace") as file:
                file.seek(start)
                return Stack.parse(file.read())
        except OSError:
            return None


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def _main_thread_time(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name in brackets may contain spaces. After it, state is field 3, user and system time are 14 and 15.
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        pass
    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0


def _catches(pid: int, number: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            masks = [line.split()[1] for line in file if line.startswith("SigCgt:")]
    except OSError:
        # True where there is no /proc, such as on macOS.
        return not os.path.isdir("/proc/self")
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)
