"""Torch's elastic agent with failure detection, joint termination and signal forwarding.

Each rank runs in its own session, so a Ctrl-C in the terminal reaches only the launcher. The launcher forwards each
signal exactly once.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from drivetrain.launch.report import (
    INTERRUPTED,
    LOST_AFTER,
    FailureRecord,
    RankFailure,
    announce,
    announce_restart,
    describe,
    first_failure,
    read_record,
    write,
)
from drivetrain.launch.watchdog import RankReport, Watchdog
from drivetrain.runtime.errors import LaunchError
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from drivetrain.runtime.heartbeat import HEARTBEAT_VARIABLE, is_expendable

# Ranks of one machine


# Windows lacks most of these signals.
PREEMPTION_SIGNALS = tuple(each for each in signal.Signals if each.name in ("SIGTERM", "SIGUSR1"))
_ENDING = ("SIGINT", "SIGHUP", "SIGQUIT")
FORWARDED_SIGNALS = (*PREEMPTION_SIGNALS, *(each for each in signal.Signals if each.name in _ENDING))
EXIT_PATIENCE = 10.0  # seconds for the exit handlers of a failed rank, in which trackers upload
STOP_PATIENCE = 2.0  # seconds between SIGTERM and SIGKILL for the other ranks after a failure
_POLL_INTERVAL = 0.02
_DYING = 0.2  # seconds that a killed process may still exist after its peers have seen its sockets close


@dataclass(frozen=True)
class Ending:
    exit_code: int
    # the time when the process was last seen running
    last_seen: float


class LocalRanks:
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
        self.hang: RankFailure | None = None  # set if the watchdog has found a hang

    # State

    def poll(self) -> None:
        now = time.time()
        for local, process in self._processes.items():
            if local not in self.endings and (code := process.poll()) is not None:
                self.endings[local] = Ending(code, self._last_poll)
        self._last_poll = now

    def alive(self) -> list[int]:
        return [local for local in self._processes if local not in self.endings]

    def all_succeeded(self) -> bool:
        return not self.alive() and all(ending.exit_code == 0 for ending in self.endings.values())

    def ended_early(self) -> list[int]:
        return [self._global_ranks[local] for local, ending in self.endings.items() if ending.exit_code == 0]

    def is_failing(self, local: int) -> bool:
        record = self._record(local)
        # The process may still be running its exit handlers.
        return record is not None and record.final

    def any_failed(self) -> bool:
        failed = self._failed()
        return bool(failed) and not 0 < len(self.lost()) == len(failed)

    def lost(self) -> list[int]:
        failed = self._failed()
        # Nobody is left to continue the work.
        if len(failed) == len(self._processes):
            return []
        # A rank is expendable if it processes items of a work queue: another rank then takes over its current item.
        return [
            local
            for local in failed
            if local not in self.stopped
            and is_expendable(self._error_files[local])
            and not self._was_asked_to_stop(local)
        ]

    def _failed(self) -> list[int]:
        # A failure record counts before its process has ended, since exit handlers may take long.
        return [
            local
            for local in self._processes
            if (self.endings[local].exit_code != 0 if local in self.endings else self.is_failing(local))
        ]

    def _was_asked_to_stop(self, local: int) -> bool:
        ending, record = self.endings.get(local), self._record(local)
        code = ending.exit_code if ending is not None else record.exit_code if record is not None else 0
        # A rank that was preempted or interrupted ends the run. It is not lost.
        return code in (RESUME_EXIT_CODE, 128 + signal.SIGINT, -signal.SIGINT)

    def any_crashed(self, number: signal.Signals | None) -> bool:
        others = self._processes.keys() - self.lost()
        endings = [self.endings[local] for local in others if local in self.endings]
        # `number` is the signal that the launcher has forwarded.
        if any(ending.exit_code < 0 and ending.exit_code != -(number or 0) for ending in endings):
            return True
        return any((record := self._record(local)) is not None and record.final and record.text for local in others)

    def failures(self, with_lost: bool = True) -> list[RankFailure]:
        # Others take over the work of lost ranks.
        left_out = () if with_lost else self.lost()
        failures = [self.hang] if self.hang is not None else []
        for local, process in self._processes.items():
            ending, record = self.endings.get(local), self._record(local)
            if local in left_out or (ending is not None and ending.exit_code == 0):
                continue
            if record is None:
                if ending is None or local in self.stopped:
                    continue
                # A rank killed by a signal leaves no record. Date its failure slightly before it was last seen alive,
                # so that it precedes the failures that it caused in other ranks.
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

    def ended_with(self, exit_code: int) -> bool:
        failures = self.failures(with_lost=False)
        return bool(failures) and first_failure(failures).exit_code == exit_code

    def _record(self, local: int) -> FailureRecord | None:
        return read_record(self._error_files[local])

    # Termination

    def await_other_failures(self) -> None:
        self.wait((local for local in self.alive() if not self.is_failing(local)), _DYING)

    def stop(self, ranks: Iterable[int], patience: float = STOP_PATIENCE) -> None:
        ranks = list(ranks)
        self.stopped.update(ranks)  # before the signal, so that its victims do not count as failed on their own
        if patience:
            self.send(ranks, signal.SIGTERM)
            self.wait(ranks, patience)
        # A process that waits in a collective does not react to SIGTERM.
        self.kill(ranks)

    def send(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to ranks and to their child processes."""
        self._signal(ranks, number, os.killpg)

    def forward(self, ranks: Iterable[int], number: signal.Signals) -> None:
        ranks = list(ranks)
        self.stopped.update(ranks)
        self._signal(ranks, number, self._forward_with)

    def global_rank(self, local: int) -> int:
        return self._global_ranks[local]

    def _signal(self, ranks: Iterable[int], number: signal.Signals, send: Callable[[int, int], None]) -> None:
        for local in ranks:
            if local not in self.endings:
                try:
                    send(self._processes[local].pid, number)
                except ProcessLookupError:
                    pass

    def kill(self, ranks: Iterable[int]) -> None:
        left = [local for local in ranks if local not in self.endings]
        self.send(left, signal.SIGKILL)
        self.wait(left, STOP_PATIENCE)

    def wait(self, ranks: Iterable[int], patience: float, until: Callable[[], bool] = lambda: False) -> None:
        waited_for = set(ranks)
        deadline = time.monotonic() + patience
        self.poll()
        while waited_for - self.endings.keys() and time.monotonic() < deadline and not until():
            time.sleep(_POLL_INTERVAL)
            self.poll()

    def end_orphans(self) -> None:
        """Kill child processes that exited ranks have left behind, such as data workers.

        SIGTERM comes first, because multiprocessing's resource tracker needs a moment to free shared memory.
        """
        self._signal_orphans(signal.SIGTERM)
        deadline = time.monotonic() + STOP_PATIENCE
        while self._orphans() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
        self._signal_orphans(signal.SIGKILL)

    def _signal_orphans(self, number: signal.Signals) -> None:
        for orphan in self._orphans():
            try:
                orphan.send_signal(number)
            except psutil.NoSuchProcess:
                pass

    def _orphans(self) -> list[psutil.Process]:
        # Each rank leads its own session, and its child processes stay in it after the rank has exited.
        sessions = {self._processes[local].pid for local in self.endings}
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                pass
        return found


# Communication between the launchers of several machines


_PEERS_POLL_INTERVAL = 1.0  # seconds between two reads of the store
_SETTLE = 2.5  # seconds for all machines to publish their failures
_STACKS_TIME = 4.0  # seconds for other machines to collect their ranks' stacks
_FAREWELL = 3.0  # seconds that the machine with the store waits for the others to read


def agree_on_counts(store: Store, machine: int, machines: int, attempts: int, failures: int) -> tuple[int, int]:
    # A machine that joins the run later continues the counts of the others.
    store.set(f"drivetrain/counts/{machine}", json.dumps([attempts, failures]))
    # `get` waits until the other machine has written its counts.
    counts = [json.loads(store.get(f"drivetrain/counts/{peer}")) for peer in range(machines)]
    return max(count[0] for count in counts), max(count[1] for count in counts)


class Peers:
    """Connection between the launchers of a run's machines, so that they stop and restart ranks together.

    Each start of the ranks uses its own keys. With a single machine, all methods return at once. The same happens after
    the machine that serves the store has exited.
    """

    def __init__(self, store: Any, machine: int, machines: int, attempt: int) -> None:
        self._store = store
        self._machine = machine
        self._machines = machines
        self._prefix = f"drivetrain/attempt{attempt}"
        self._next_poll = 0.0
        self._beats = 0
        self._last_signs = {peer: (-1, time.monotonic()) for peer in range(machines) if peer != machine}

    def publish(self, failure: RankFailure | None) -> None:
        self._write(f"failed/{self._machine}", failure.to_json() if failure is not None else "")
        self._write("failed")

    def publish_stopping(self) -> None:
        self._write(f"stopping/{self._machine}")

    def any_stopping(self) -> bool:
        return any(self._has([key]) for key in self._keys("stopping"))

    def failed_elsewhere(self) -> bool:
        return self._has([f"{self._prefix}/failed"])

    def collect_stacks(self, own: str) -> str:
        if self._machines == 1:
            return own
        self.publish_stacks(own)
        self._write("stacks_wanted")
        found = [own]
        try:
            self._wait_for_all("stacks", _STACKS_TIME)
            found = []
            for machine, key in enumerate(self._keys("stacks")):
                here = self._store.check([key])
                found.append(self._store.get(key).decode() if here else f"  machine {machine} did not answer.")
        except RuntimeError:
            pass  # the machine that serves the store has exited
        return "\n".join(found)

    def stacks_wanted(self) -> bool:
        return self._has([f"{self._prefix}/stacks_wanted"]) and not self._has([self._keys("stacks")[self._machine]])

    def publish_stacks(self, own: str) -> None:
        self._write(f"stacks/{self._machine}", own)

    def is_time_to_poll(self) -> bool:
        now = time.monotonic()
        if self._machines == 1 or now < self._next_poll:
            return False
        self._next_poll = now + _PEERS_POLL_INTERVAL
        # a heartbeat for the other machines
        self._beats += 1
        self._write(f"alive/{self._machine}", str(self._beats))
        return True

    def lost(self) -> list[int]:
        now = time.monotonic()
        try:
            # Compare counters and use only this machine's clock, because clocks differ between machines.
            for peer, (beats, _) in self._last_signs.items():
                if self._machines == 1 or not self._store.check([key := f"{self._prefix}/alive/{peer}"]):
                    continue
                if (new := int(self._store.get(key))) != beats:
                    self._last_signs[peer] = (new, now)
        except RuntimeError:
            self._machines = 1
        if self._machines == 1:
            return []
        return [peer for peer, (_, last) in self._last_signs.items() if now - last > LOST_AFTER]

    def all_done(self) -> bool:
        # This machine has succeeded.
        self._write(f"done/{self._machine}")
        # The machine that serves the store exits only after all machines are done.
        return self._has(self._keys("done")) or self._machines == 1

    def agree_on_first(self, own: RankFailure | None, *, final: bool = True) -> RankFailure | None:
        if self._machines == 1:
            return own
        # This machine's ranks have exited.
        self.publish(own)
        found = [own] if own is not None else []
        try:
            self._wait_for_all("failed", _SETTLE)
            for key in self._keys("failed"):
                if self._store.check([key]) and (published := self._store.get(key).decode()):
                    found.append(RankFailure.from_json(published))
            # The store may disappear after the last exchange, so wait until the other machines have read the failures.
            if final:
                self._write(f"read/{self._machine}")
                self._wait_for_all("read", _FAREWELL)
        except RuntimeError:
            pass  # the machine that serves the store exits only after all have read
        return first_failure(found) if found else None

    def _keys(self, what: str) -> list[str]:
        return [f"{self._prefix}/{what}/{machine}" for machine in range(self._machines)]

    def _has(self, keys: list[str]) -> bool:
        try:
            return self._machines > 1 and bool(self._store.check(keys))
        except RuntimeError:
            # No failure: machine 0, which serves the store, may have finished before the others.
            self._machines = 1
            return False

    def _wait_for_all(self, what: str, patience: float) -> None:
        deadline = time.monotonic() + patience
        while not self._store.check(self._keys(what)) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _write(self, key: str, value: str = "1") -> None:
        try:
            if self._machines > 1:
                self._store.set(f"{self._prefix}/{key}", value)
        except RuntimeError:
            self._machines = 1


_LOST = "The other ranks continue: it was processing items of a work queue, and its current item goes to another rank."


class RankAgent(LocalElasticAgent):
    """Agent of torch elastic that runs the ranks of one machine."""

    def __init__(
        self,
        spec: WorkerSpec,
        *arguments: Any,
        variables: Mapping[str, str],
        grace_period: float,
        can_shrink: bool,
        signal_all: bool,
        watchdog: Watchdog | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, *arguments, **options)
        self._variables = variables
        self._grace_period = grace_period
        self._can_shrink = can_shrink
        self._signal_all = signal_all
        self._watchdog = watchdog
        self._attempt = -1  # number of restarts so far, equal on every machine
        self._failed_attempts = 0
        self._machines = 0
        self.ranks = LocalRanks({}, {}, {})  # ranks of the current attempt
        self._peers = Peers(None, machine=0, machines=1, attempt=0)
        self._fresh_store: TCPStore | None = None
        self._watching = False  # True while ranks run, so that signals are forwarded to them
        self._stopping = False  # True while ranks are terminated after a failure
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._seen: set[signal.Signals] = set()
        self.received: signal.Signals | None = None
        self.ended_by_signal = False
        self.preempted = False
        self.lost_machines = False
        self.lost: dict[int, RankFailure] = {}  # expendable ranks that have failed, by global rank
        self.overdue: list[int] = []  # global ranks that did not end within the grace period

    @property
    def world_size(self) -> int:
        workers = self._worker_group.workers
        return workers[0].world_size if workers else 0

    @property
    def restarting(self) -> bool:
        return self._attempt >= 0 and not self._watching

    def first_failure(self, *, final: bool = True) -> RankFailure | None:
        failures = self.ranks.failures()
        return self._peers.agree_on_first(first_failure(failures) if failures else None, final=final)

    def restore_signals(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()

    # Overrides of torch's agent

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Torch 2.13 reuses the ranks' store in later rounds, with the keys of dead ranks, and a machine that joins
        # later does not get its address. Clearing this attribute creates a new store for each round.
        worker_group.spec.rdzv_handler._bootstrap_store_info = None  # type: ignore[attr-defined]
        super()._rendezvous(worker_group)
        machine, machines = worker_group.group_rank or 0, worker_group.group_world_size or 1
        store: Any = worker_group.store
        self._attempt += 1
        if worker_group.spec.rdzv_handler.get_backend() == "static":
            # Every machine restarts after any failure, so the counts agree. The store still has the old keys, so the
            # ranks of a restart need a new one.
            if self._attempt > 0:
                worker_group.master_port = self._fresh_port(store, machine, worker_group.master_addr or "")
        elif machines > 1:
            counts = agree_on_counts(store, machine, machines, self._attempt, self._failed_attempts)
            self._attempt, self._failed_attempts = counts
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - self._failed_attempts)
        self._peers = Peers(store, machine, machines, self._attempt)
        if self._machines not in (0, machines):
            announce(f"continuing with {machines} machine(s) instead of {self._machines}.")
        self._machines = machines

    def _fresh_port(self, store: Any, machine: int, address: str) -> Any:
        key = f"drivetrain/port{self._attempt}"
        if machine == 0:
            self._fresh_store = TCPStore(address, 0, is_master=True, multi_tenant=True)
            store.set(key, str(self._fresh_store.port))
        return int(store.get(key))

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        # Torch calls this method with the final environment of all ranks. Torch 2.9 has no other hook for it.
        super()._setup_local_watchdog(envs)
        for local_rank, variables in envs.items():
            variables.update(self._variables)
            variables["TORCHELASTIC_RESTART_COUNT"] = str(self._attempt)  # torch counts only this machine's failures
            if self._watchdog is not None:
                variables[HEARTBEAT_VARIABLE] = self._watchdog.path(local_rank)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
        started: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        global_ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self.ranks = LocalRanks(
            {local: handler.proc for local, handler in context.subprocess_handlers.items()},
            global_ranks,
            context.error_files,
            signal_all=self._signal_all,
        )
        if self._watchdog is not None:
            self._watchdog.start(context.pids(), global_ranks, self.world_size)
        self.preempted = False
        self.lost = {}
        self._watching, self._stopping = True, False
        if in_main_thread:
            self._take_signals(before)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks, peers = self.ranks, self._peers
        ranks.poll()
        if self.received is not None and not ranks.any_failed():
            return self._end_by_signal(self.received)
        if peers.is_time_to_poll():
            self.lost_machines = bool(peers.lost())
            if self.lost_machines or peers.failed_elsewhere():
                self._stopping = True
                self._stop_peers(ranks.alive())
                return self._failed()
            if self._watchdog is not None and peers.stacks_wanted():
                peers.publish_stacks(self._watchdog.describe(self._watchdog.report(ranks.alive())))
        watchdog = self._watchdog if not ranks.any_failed() else None
        if watchdog is not None and (reports := watchdog.poll(ranks.alive())) is not None:
            return self._end_hang(watchdog, reports)
        if ranks.any_failed():
            self._stopping = True
            ranks.await_other_failures()
            if ranks.ended_with(RESUME_EXIT_CODE):
                return self._end_preempted()
            if ranks.ended_with(128 + signal.SIGINT):
                ranks.wait(ranks.alive(), EXIT_PATIENCE)  # other ranks may still be saving
            failures = ranks.failures()
            peers.publish(first_failure(failures) if failures else None)
            self._stop_peers(local for local in ranks.alive() if not ranks.is_failing(local))
            ranks.wait(ranks.alive(), EXIT_PATIENCE)
            ranks.kill(ranks.alive())
        elif self._record_lost(ranks):
            return self._continue_without_lost(worker_group)
        elif ranks.alive() or not peers.all_done():
            return RunResult(state=WorkerState.HEALTHY)
        # Torch polls only after all ranks have ended. If it detects a failure first, it waits 30 s for ranks that do
        # not react to SIGTERM.
        self._watching = False
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            return self._failed()
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Torch also calls this when machines join or leave, which is no failure.
        ranks, peers = self.ranks, self._peers
        if alive := ranks.alive():
            self._stopping = True
            if peers.failed_elsewhere():
                self._failed_attempts += 1
                ranks.kill(alive)
            else:
                ranks.forward(alive, signal.SIGTERM)  # machines have joined: the ranks save and exit
                self._await_savers(signal.SIGTERM)
        self._watching = False
        self._raise_if_signalled()
        failure = None
        if ranks.ended_with(RESUME_EXIT_CODE):
            failure = first_failure(ranks.failures())
        elif ranks.failures() or peers.failed_elsewhere():
            failure = self.first_failure(final=False)
        if failure is not None or self.lost_machines:
            most = worker_group.spec.max_restarts
            announce_restart(failure, self.world_size, self._failed_attempts, most)
        self.lost_machines = False
        ranks.end_orphans()
        self._raise_if_signalled()
        super()._restart_workers(worker_group)

    # Ends of an attempt

    def _failed(self) -> RunResult:
        self._watching = False
        self._failed_attempts += 1
        return RunResult(state=WorkerState.FAILED)

    def _record_lost(self, ranks: LocalRanks) -> bool:
        gone = {ranks.global_rank(local) for local in ranks.lost()}
        for failure in ranks.failures():
            if failure.rank in gone and failure.rank not in self.lost:
                self.lost[failure.rank] = failure
                write(describe(failure, self.world_size, then=_LOST))
        return bool(self.lost)

    def _continue_without_lost(self, worker_group: WorkerGroup) -> RunResult:
        ranks, peers = self.ranks, self._peers
        if not set(ranks.alive()) - set(ranks.lost()):
            ranks.wait(ranks.alive(), EXIT_PATIENCE)
            ranks.kill(ranks.alive())
        if ranks.alive() or not peers.all_done():
            return RunResult(state=WorkerState.HEALTHY)
        self._watching = False
        returned = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=returned)

    def _give_up(self) -> RunResult:
        self._remaining_restarts = 0
        self._watching = False
        return RunResult(state=WorkerState.FAILED)

    def _stop_peers(self, locals_: Iterable[int]) -> None:
        # at once before a restart
        self.ranks.stop(locals_, patience=0.0 if self._remaining_restarts else STOP_PATIENCE)

    def _end_hang(self, watchdog: Watchdog, reports: list[RankReport]) -> RunResult:
        ranks, peers = self.ranks, self._peers
        self._stopping = True
        ranks.hang = watchdog.failure(reports, peers.collect_stacks(watchdog.describe(reports)))
        peers.publish(ranks.hang)
        self._stop_peers(ranks.alive())
        return self._failed()

    def _end_preempted(self) -> RunResult:
        # Preempted ranks save a checkpoint before they exit.
        self._await_savers()
        self.preempted = True
        if self.received is None and self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0:
            # Another launcher asked to stop because machines have joined. Torch's loop starts the larger group.
            self._watching = False
            return RunResult(state=WorkerState.HEALTHY)
        leaving = self.received is not None or (not self._can_shrink and self._peers.any_stopping())
        return self._give_up() if leaving else self._failed()

    def _end_by_signal(self, number: signal.Signals) -> RunResult:
        ranks, peers = self.ranks, self._peers
        self.ended_by_signal = True
        peers.publish_stopping()
        ranks.forward(ranks.alive(), number)
        if number == signal.SIGINT:
            announce(INTERRUPTED)
        self._await_savers(number)
        self.preempted = ranks.ended_with(RESUME_EXIT_CODE)
        return self._give_up()

    def _await_savers(self, number: signal.Signals | None = None) -> None:
        ranks = self.ranks
        ranks.wait(ranks.alive(), self._grace_period, until=lambda: ranks.any_crashed(number))
        if ranks.any_crashed(number):
            ranks.stop(local for local in ranks.alive() if not ranks.is_failing(local))
            ranks.wait(ranks.alive(), EXIT_PATIENCE)
        else:
            # Ranks with a final record have saved. Exiting an interpreter with torch takes seconds under load.
            ranks.wait([local for local in ranks.alive() if ranks.is_failing(local)], EXIT_PATIENCE)
            self.overdue = [ranks.global_rank(local) for local in ranks.alive()]
        ranks.stopped.update(ranks.alive())
        ranks.kill(ranks.alive())

    # Signals

    def _take_signals(self, before: dict[signal.Signals, Any]) -> None:
        # `before` has the handlers from before torch installed its own. Those of torch raise an exception at an
        # arbitrary point of the program.
        for number, handler in before.items():
            self._previous_handlers.setdefault(number, handler)
            # Ignored signals stay ignored, so that `nohup drivetrain launch …` outlives its terminal.
            signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGTERM and number in self._seen
        self._seen.add(signal.Signals(number))
        again = again or (number == signal.SIGINT and (self.received is not None or self._stopping))
        if again:
            self.ranks.send(self.ranks.alive(), signal.SIGKILL)
        if self.received is None:
            self.received = signal.Signals(number)
        if not self._watching:
            raise KeyboardInterrupt  # no ranks run: between two attempts, or while waiting for other machines

    def _raise_if_signalled(self) -> None:
        if self.received is not None:
            raise KeyboardInterrupt


class ProcessesFailed(LaunchError, ChildFailedError):
    # Scripts may catch this error as torch's ChildFailedError.
    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.name, self.failures = "launch", {}
