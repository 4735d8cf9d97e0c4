"""Torch's elastic agent, taught who failed first, to stop everybody at once and to pass signals on once.

The agent starts each rank in a session of its own, so a Ctrl-C at the terminal reaches the launcher alone and
is passed on from here: each rank, with the processes that it has started, sees it exactly once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from drivetrain.launch.peers import Peers
from drivetrain.launch.report import FailureRecord, RankFailure, first_failure, read_record

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_STOP_PATIENCE = 2.0  # seconds that the peers of a failed rank have between SIGTERM and SIGKILL
_EXIT_PATIENCE = 10.0  # seconds that a failed rank has for its exit handlers: trackers upload in them
_SIGNAL_PATIENCE = 30.0  # seconds to end cleanly after a forwarded signal, as torch has it
_PATIENCE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_POLL_INTERVAL = 0.02


@dataclass(frozen=True)
class _Ending:
    """How a rank's process ended: its exit code, and the last time it was seen alive, in seconds."""

    exit_code: int
    last_seen: float


class RankAgent(LocalElasticAgent):
    """Starts the ranks of one machine, watches them and ends them together.

    Args:
        on_restart: called with the first failure of an attempt that is followed by another.
        on_interrupt: called when the first Ctrl-C has been passed on.
        arguments: those of torch's agent.
    """

    def __init__(
        self,
        *arguments: Any,
        on_restart: Callable[[RankFailure], None],
        on_interrupt: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._on_restart = on_restart
        self._on_interrupt = on_interrupt
        self._attempts = 0
        self._endings: dict[int, _Ending] = {}
        self._last_look = 0.0
        self._watching = False  # ranks run, and signals are for them
        self._stopping = False  # one has failed, and all are being ended
        self._peers: Peers | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self.stopped: set[int] = set()
        self.received: signal.Signals | None = None

    @property
    def world_size(self) -> int:
        """Processes of the run, over all machines."""
        workers = self._worker_group.workers
        return workers[0].world_size if workers else 0

    @property
    def on_several_machines(self) -> bool:
        """Whether other launchers take part."""
        return (self._worker_group.group_world_size or 1) > 1

    def first_failure(self) -> RankFailure | None:
        """The first failure over all machines; None where no rank failed by itself."""
        failures = self._failures()
        own = first_failure(failures) if failures else None
        return self._peers.agree_on_first(own) if self._peers is not None else own

    def ended_early(self) -> list[int]:
        """Global ranks of this machine that had ended well before the others failed."""
        return [self._rank(local) for local, ending in self._endings.items() if ending.exit_code == 0]

    def restore_signals(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()

    # what torch's agent calls

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
        started: dict[int, Any] = super()._start_workers(worker_group)
        if in_main_thread:
            self._take_signals(before)
        self._endings.clear()
        self.stopped.clear()
        self._last_look = time.time()
        self._watching, self._stopping = True, False
        store, machine = worker_group.store, worker_group.group_rank
        if store is not None and machine is not None:
            self._peers = Peers(store, machine, worker_group.group_world_size or 1, self._attempts)
        self._attempts += 1
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        if self.received is not None:
            return self._end_by_signal(self.received)
        if self._peers is not None and self._peers.failed_elsewhere():
            self._stop(self._alive())
            return self._give_up()
        if self._someone_failed():
            self._stopping = True
            if self._peers is not None and self._remaining_restarts == 0 and (failures := self._failures()):
                self._peers.publish(first_failure(failures))
            self._stop(local for local in self._alive() if not self._is_failing(local))
            self._wait(self._alive(), _EXIT_PATIENCE)
            self._kill(self._alive())
        elif self._alive():
            return RunResult(state=WorkerState.HEALTHY)
        # Torch's own look only now that all have ended: on a failure that it is the first to see, it waits
        # half a minute for peers that do not hear SIGTERM.
        self._watching = False
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Also called when machines come or go, which is no failure.
        if failures := self._failures():
            self._on_restart(first_failure(failures))
        super()._restart_workers(worker_group)

    # watching

    @property
    def _processes(self) -> dict[int, Any]:
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return {}
        return {local: handler.proc for local, handler in context.subprocess_handlers.items()}

    def _look(self) -> None:
        """Note who has ended since the last look."""
        now = time.time()
        for local, process in self._processes.items():
            if local not in self._endings and (code := process.poll()) is not None:
                self._endings[local] = _Ending(code, self._last_look)
        self._last_look = now

    def _alive(self) -> list[int]:
        return [local for local in self._processes if local not in self._endings]

    def _record(self, local: int) -> FailureRecord | None:
        return read_record(self._pcontext.error_files[local]) if self._pcontext is not None else None

    def _is_failing(self, local: int) -> bool:
        """Whether a rank that still lives has said that it ends."""
        record = self._record(local)
        return record is not None and record.final

    def _someone_failed(self) -> bool:
        # A record counts before its process has ended: exit handlers may take long, the peers need not wait.
        ended = any(ending.exit_code != 0 for ending in self._endings.values())
        return ended or any(map(self._is_failing, self._alive()))

    def _failures(self) -> list[RankFailure]:
        """The ranks of this machine that failed by themselves."""
        failures = []
        for local, process in self._processes.items():
            ending, record = self._endings.get(local), self._record(local)
            if ending is not None and ending.exit_code == 0:
                continue
            if record is None:
                if ending is None or local in self.stopped:
                    continue
                # A signal leaves no record: such a death is dated to when the rank was last seen alive, so that
                # it comes before what it brought on its peers.
                record = FailureRecord("", ending.last_seen, ending.exit_code)
            failures.append(
                RankFailure(
                    rank=self._rank(local),
                    local_rank=local,
                    pid=process.pid,
                    exit_code=record.exit_code,
                    timestamp=record.timestamp,
                    text=record.text,
                    host=os.uname().nodename,
                )
            )
        return failures

    def _rank(self, local: int) -> int:
        return self._worker_group.workers[local].global_rank

    # ending

    def _stop(self, locals_: Iterable[int]) -> None:
        """Ask ranks to end, and end those that do not (they may sit in a collective and hear nothing)."""
        ranks = list(locals_)
        self.stopped.update(ranks)
        self._send(ranks, signal.SIGTERM)
        self._wait(ranks, _STOP_PATIENCE)
        self._kill(ranks)

    def _end_by_signal(self, number: signal.Signals) -> RunResult:
        ranks = self._alive()
        self.stopped.update(ranks)
        self._send(ranks, number)
        if number == signal.SIGINT:
            self._on_interrupt()
        self._wait(ranks, float(os.environ.get(_PATIENCE_VARIABLE, _SIGNAL_PATIENCE)))
        self._kill(ranks)
        return self._give_up()

    def _give_up(self) -> RunResult:
        self._remaining_restarts = 0
        self._watching = False
        return RunResult(state=WorkerState.FAILED)

    def _send(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to ranks that live, and to the processes that they have started."""
        for local in ranks:
            if local not in self._endings:
                try:
                    os.killpg(self._processes[local].pid, number)
                except ProcessLookupError:
                    pass

    def _kill(self, ranks: Iterable[int]) -> None:
        left = [local for local in ranks if local not in self._endings]
        self._send(left, signal.SIGKILL)
        self._wait(left, _STOP_PATIENCE)

    def _wait(self, ranks: Iterable[int], patience: float) -> None:
        waited_for = set(ranks)
        deadline = time.monotonic() + patience
        self._look()
        while waited_for - self._endings.keys() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
            self._look()

    # signals

    def _take_signals(self, before: dict[signal.Signals, Any]) -> None:
        """Put our handlers in the place of torch's, which raise wherever the program happens to be."""
        for number, handler in before.items():
            self._previous_handlers.setdefault(number, handler)
            # What was ignored stays so: `nohup drivetrain launch …` outlives its terminal.
            signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal for the next look; a second Ctrl-C kills."""
        if number == signal.SIGINT and (self.received is not None or self._stopping):
            self._send(self._alive(), signal.SIGKILL)
        elif self.received is None and not self._stopping:
            self.received = signal.Signals(number)
        if not self._watching:
            raise KeyboardInterrupt  # waiting for other machines: there is nothing to end here
