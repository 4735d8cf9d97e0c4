"""The ranks of one machine during one attempt: who lives, who failed and how, and ending them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from drivetrain.launch.report import FailureRecord, RankFailure, first_failure, read_record
from drivetrain.runtime.errors import LaunchError
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from drivetrain.runtime.expendable import is_expendable


def _signals(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))  # Windows has few


PREEMPTION_SIGNALS = _signals("SIGTERM", "SIGUSR1")
FORWARDED_SIGNALS = (*_signals("SIGINT"), *PREEMPTION_SIGNALS, *_signals("SIGHUP", "SIGQUIT"))
EXIT_PATIENCE = 10.0  # seconds that a failed rank has for its exit handlers: trackers upload in them
LOST_AFTER = 30.0  # seconds without a sign of life after which a machine counts as gone
STOP_PATIENCE = 2.0  # seconds that the peers of a failed rank have between SIGTERM and SIGKILL
_POLL_INTERVAL = 0.02
_DYING = 0.2  # seconds that a killed process may take to be gone after its peers have seen its sockets close


@dataclass(frozen=True)
class Ending:
    """How a rank's process ended: its exit code, and the last time it was seen alive, in seconds."""

    exit_code: int
    last_seen: float


def require_posix() -> None:
    """Raise where the system lacks what starting and ending ranks needs.

    Raises:
        LaunchError: It is Windows.
    """
    if not (hasattr(signal, "SIGUSR1") and hasattr(os, "fork")):
        raise LaunchError(
            "drivetrain starts several processes on Linux, macOS and WSL only. On Windows run the script in one "
            "process (`python script.py`, Trainer(devices=1)), or in WSL."
        )


class LocalRanks:
    """The processes that one attempt has started on this machine, by local rank.

    Args:
        processes: Each a session of its own, so that a signal can reach what it has started too.
        global_ranks: Their global ranks.
        error_files: Where each leaves its failure.
        signal_all: Whether a signal that is passed on goes to all that a rank has started as well. A program that is
            not Python may be a shell, which would end alone; loader workers of one that is would die of it, and the
            rank with them.
    """

    def __init__(
        self,
        processes: dict[int, Any],
        global_ranks: dict[int, int],
        error_files: dict[int, str],
        *,
        signal_all: bool = False,
    ) -> None:
        self._forward_with = os.killpg if signal_all else os.kill
        self._processes = processes
        self._global_ranks = global_ranks
        self._error_files = error_files
        self._last_poll = time.time()
        self.endings: dict[int, Ending] = {}
        self.stopped: set[int] = set()
        self.hang: RankFailure | None = None  # what the watchdog found

    @property
    def pids(self) -> dict[int, int]:
        """Process ids, by local rank."""
        return {local: process.pid for local, process in self._processes.items()}

    # watching

    def poll(self) -> None:
        """Record which ranks have ended since the last poll."""
        now = time.time()
        for local, process in self._processes.items():
            if local not in self.endings and (code := process.poll()) is not None:
                self.endings[local] = Ending(code, self._last_poll)
        self._last_poll = now

    def alive(self) -> list[int]:
        """Local ranks that have not ended."""
        return [local for local in self._processes if local not in self.endings]

    def all_succeeded(self) -> bool:
        """Whether every rank has ended with exit code 0."""
        return not self.alive() and all(ending.exit_code == 0 for ending in self.endings.values())

    def ended_early(self) -> list[int]:
        """Global ranks that had ended well before the others failed."""
        return [self._global_ranks[local] for local, ending in self.endings.items() if ending.exit_code == 0]

    def is_failing(self, local: int) -> bool:
        """Whether a rank, perhaps still alive, has recorded that it ends with an error."""
        record = self._record(local)
        return record is not None and record.final

    def any_failed(self) -> bool:
        """Whether a rank has ended, or is about to end, with another exit code than 0, and others cannot continue."""
        failed = self._failed()
        return bool(failed) and not 0 < len(self.lost()) == len(failed)

    def lost(self) -> list[int]:
        """Local ranks that have failed, and that the others can do without; none if all have failed."""
        failed = self._failed()
        if len(failed) == len(self._processes):
            return []
        return [
            local
            for local in failed
            if local not in self.stopped and is_expendable(self._error_files[local]) and not self._was_asked(local)
        ]

    def _failed(self) -> list[int]:
        """Local ranks that have ended, or are about to end, with another exit code than 0."""
        # A record counts before its process has ended: exit handlers may take long, the peers need not wait.
        return [
            local
            for local in self._processes
            if (self.endings[local].exit_code != 0 if local in self.endings else self.is_failing(local))
        ]

    def _was_asked(self, local: int) -> bool:
        """Whether a rank has ended by preemption or by Ctrl-C, which is meant for all."""
        ending, record = self.endings.get(local), self._record(local)
        code = ending.exit_code if ending is not None else record.exit_code if record is not None else 0
        return code in (RESUME_EXIT_CODE, 128 + signal.SIGINT, -signal.SIGINT)

    def any_crashed(self, number: signal.Signals | None) -> bool:
        """Whether a rank has raised or was killed, other than by the signal that was forwarded."""
        others = self._processes.keys() - self.lost()
        endings = [self.endings[local] for local in others if local in self.endings]
        if any(ending.exit_code < 0 and ending.exit_code != -(number or 0) for ending in endings):
            return True
        return any((record := self._record(local)) is not None and record.final and record.text for local in others)

    def failures(self, with_lost: bool = True) -> list[RankFailure]:
        """The ranks that failed by themselves.

        Args:
            with_lost: Whether also those that the others can do without.
        """
        left_out = () if with_lost else self.lost()
        failures = [self.hang] if self.hang is not None else []
        for local, process in self._processes.items():
            ending, record = self.endings.get(local), self._record(local)
            if local in left_out or (ending is not None and ending.exit_code == 0):
                continue
            if record is None:
                if ending is None or local in self.stopped:
                    continue
                # A signal leaves no record: such a death is dated to before the rank was last seen alive, so that
                # it comes before what it brought on its peers.
                record = FailureRecord("", ending.last_seen - _DYING, ending.exit_code)
            failures.append(
                RankFailure(
                    rank=self._global_ranks[local],
                    local_rank=local,
                    pid=process.pid,
                    exit_code=record.exit_code,
                    timestamp=record.timestamp,
                    text=record.text,
                    host=os.uname().nodename,
                )
            )
        return failures

    def was_preempted(self) -> bool:
        """Whether the first rank to end by itself reported that the run has saved and can be resumed."""
        failures = self.failures(with_lost=False)
        return bool(failures) and first_failure(failures).exit_code == RESUME_EXIT_CODE

    def was_interrupted(self) -> bool:
        """Whether the first rank to end by itself ended by Ctrl-C, which the others got as well."""
        failures = self.failures(with_lost=False)
        return bool(failures) and first_failure(failures).exit_code == 128 + signal.SIGINT

    def _record(self, local: int) -> FailureRecord | None:
        return read_record(self._error_files[local])

    # ending

    def await_deaths(self) -> None:
        """Wait a moment for ranks that die, where one has failed: it may only have seen another's death first."""
        self.wait((local for local in self.alive() if not self.is_failing(local)), _DYING)

    def stop(self, ranks: Iterable[int], patience: float = STOP_PATIENCE) -> None:
        """Ask ranks to end, and end those that do not (they may sit in a collective and hear nothing)."""
        ranks = list(ranks)
        self.stopped.update(ranks)
        if patience:
            self.send(ranks, signal.SIGTERM)
            self.wait(ranks, patience)
        self.kill(ranks)

    def send(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to ranks that live, and to the processes that they have started."""
        self._signal(ranks, number, os.killpg)

    def forward(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Pass a signal on to ranks that live. Those that end without a word have not failed by themselves."""
        ranks = list(ranks)
        self.stopped.update(ranks)
        self._signal(ranks, number, self._forward_with)

    def global_rank(self, local: int) -> int:
        """The global rank of a local one."""
        return self._global_ranks[local]

    def _signal(self, ranks: Iterable[int], number: signal.Signals, send: Callable[[int, int], None]) -> None:
        for local in ranks:
            if local not in self.endings:
                try:
                    send(self._processes[local].pid, number)
                except ProcessLookupError:
                    pass

    def kill(self, ranks: Iterable[int]) -> None:
        """End ranks at once, with all that they have started."""
        left = [local for local in ranks if local not in self.endings]
        self.send(left, signal.SIGKILL)
        self.wait(left, STOP_PATIENCE)

    def wait(self, ranks: Iterable[int], patience: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for ranks to end, for some seconds, or until something else is true."""
        waited_for = set(ranks)
        deadline = time.monotonic() + patience
        self.poll()
        while waited_for - self.endings.keys() and time.monotonic() < deadline and not until():
            time.sleep(_POLL_INTERVAL)
            self.poll()

    def end_what_they_left(self) -> None:
        """End processes that ended ranks have left behind, which could still write where the next attempt writes.

        They are asked first: multiprocessing's resource tracker frees shared memory, and needs a moment for it.
        """
        self._end_orphans(signal.SIGTERM)
        deadline = time.monotonic() + STOP_PATIENCE
        while self._orphans() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
        self._end_orphans(signal.SIGKILL)

    def _end_orphans(self, number: signal.Signals) -> None:
        for orphan in self._orphans():
            try:
                orphan.send_signal(number)
            except psutil.NoSuchProcess:
                pass

    def _orphans(self) -> list[psutil.Process]:
        sessions = {self._processes[local].pid for local in self.endings}
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                pass
        return found
