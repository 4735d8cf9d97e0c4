"""Torch's elastic agent, extended: it finds who failed first, stops all at once and forwards each signal once.

The agent starts each rank in a session of its own, so a Ctrl-C at the terminal reaches the launcher alone and
is passed on from here: each rank sees it exactly once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from drivetrain.launch.peers import Peers, agree_on_counts
from drivetrain.launch.ranks import EXIT_PATIENCE, FORWARDED_SIGNALS, STOP_PATIENCE, LocalRanks
from drivetrain.launch.report import RankFailure, first_failure
from drivetrain.launch.watchdog import RankReport, Watchdog
from drivetrain.runtime.heartbeat import HEARTBEAT_VARIABLE


class RankAgent(LocalElasticAgent):
    """Starts the ranks of one machine, watches them and ends them together.

    Args:
        spec: What to run, as torch's agent takes it.
        grace_period: Seconds that ranks have to save and end once they were asked to, or once one of them has
            reported that the run was preempted.
        can_shrink: Whether the run may continue with fewer machines.
        signal_all: Whether a signal also goes to all that a rank has started.
        on_restart: Called with the first failure of an attempt that is followed by another (None: a machine is
            gone), and with the number of that restart.
        on_resize: Called when the number of machines has changed, with the old one and the new one.
        on_loss: Called with the failure of a rank that the others can do without, once.
        on_interrupt: Called when the first Ctrl-C has been passed on.
        start_ranks: Makes the context in which torch's agent starts ranks; what it does decides how they start.
        watchdog: Finds ranks that make no progress; None where nothing shall.
        *arguments: Those of torch's agent.
        **options: Those of torch's agent, by name.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *arguments: Any,
        grace_period: float,
        can_shrink: bool,
        signal_all: bool,
        on_restart: Callable[[RankFailure | None, int], None],
        on_resize: Callable[[int, int], None],
        on_loss: Callable[[RankFailure], None],
        on_interrupt: Callable[[], None],
        start_ranks: Callable[[], AbstractContextManager[None]],
        watchdog: Watchdog | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, *arguments, **options)
        self._grace_period = grace_period
        self._can_shrink = can_shrink
        self._signal_all = signal_all
        self._on_restart = on_restart
        self._on_resize = on_resize
        self._on_loss = on_loss
        self._on_interrupt = on_interrupt
        self._start_ranks = start_ranks
        self._watchdog = watchdog
        self._attempt = -1  # number of restarts so far, the same on every machine
        self._failed_attempts = 0
        self._machines = 0
        self._ranks: LocalRanks | None = None
        self._peers: Peers | None = None
        self._fresh_store: TCPStore | None = None
        self._watching = False  # ranks run, and signals are for them
        self._stopping = False  # one has failed, and all are being ended
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._seen: set[signal.Signals] = set()
        self.received: signal.Signals | None = None
        self.ended_by_signal = False
        self.preempted = False
        self.lost_machines = False
        self._lost: dict[int, RankFailure] = {}  # by global rank
        self.overdue: list[int] = []  # global ranks that did not end within the grace period

    @property
    def world_size(self) -> int:
        """Processes of the run, over all machines."""
        workers = self._worker_group.workers
        return workers[0].world_size if workers else 0

    @property
    def on_several_machines(self) -> bool:
        """Whether other launchers take part."""
        return (self._worker_group.group_world_size or 1) > 1

    @property
    def restarting(self) -> bool:
        """Whether an attempt has ended and the next one has not begun."""
        return self._attempt >= 0 and not self._watching

    def first_failure(self, *, final: bool = True) -> RankFailure | None:
        """The first failure over all machines; None where no rank failed by itself."""
        failures = self._ranks.failures() if self._ranks is not None else []
        own = first_failure(failures) if failures else None
        return self._peers.agree_on_first(own, final=final) if self._peers is not None else own

    def ended_early(self) -> list[int]:
        """Global ranks of this machine that had ended well before the others failed."""
        return self._ranks.ended_early() if self._ranks is not None else []

    @property
    def status_without_lost(self) -> int:
        """The exit code of a run whose other ranks have ended well: that of rank 0, which speaks for all."""
        return self._lost[0].status if 0 in self._lost else 0

    def all_succeeded(self) -> bool:
        """Whether every rank of this machine has ended with exit code 0."""
        return self._ranks is not None and self._ranks.all_succeeded()

    def restore_signals(self) -> None:
        """Restore the handlers that the signals had before."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()

    # what torch's agent calls

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Torch keeps where the ranks meet from one round to the next, with the keys of ranks that are dead, and
        # a machine that joins later does not get it (seen with 2.13). Forgotten, it makes a fresh store for each round.
        worker_group.spec.rdzv_handler._bootstrap_store_info = None  # type: ignore[attr-defined]
        super()._rendezvous(worker_group)
        machine, machines = worker_group.group_rank or 0, worker_group.group_world_size or 1
        store: Any = worker_group.store
        self._attempt += 1
        if worker_group.spec.rdzv_handler.get_backend() == "static":
            # Machines count alike: the failure of one is everybody's. But the store stays, with its old keys.
            if self._attempt > 0:
                worker_group.master_port = self._fresh_port(store, machine, worker_group.master_addr or "")
        else:
            counts = agree_on_counts(store, machine, machines, self._attempt, self._failed_attempts)
            self._attempt, self._failed_attempts = counts
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - self._failed_attempts)
        self._peers = Peers(store, machine, machines, self._attempt)
        if self._machines not in (0, machines):
            self._on_resize(self._machines, machines)
        self._machines = machines

    def _fresh_port(self, store: Any, machine: int, address: str) -> Any:
        """Where the ranks of a restart find a fresh store; machine 0 serves it."""
        key = f"drivetrain/port{self._attempt}"
        if machine == 0:
            self._fresh_store = TCPStore(address, 0, is_master=True, multi_tenant=True)
            store.set(key, str(self._fresh_store.port))
        return int(store.get(key))

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        # Where torch has put together what it gives the ranks, by local rank; in 2.9 too, which has no hook for one.
        super()._setup_local_watchdog(envs)
        for local_rank, variables in envs.items():
            variables["TORCHELASTIC_RESTART_COUNT"] = str(self._attempt)  # torch counts failures of this machine alone
            if self._watchdog is not None:
                variables[HEARTBEAT_VARIABLE] = self._watchdog.path(local_rank)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
        with self._start_ranks():
            started: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        self._ranks = LocalRanks(
            {local: handler.proc for local, handler in context.subprocess_handlers.items()},
            {worker.local_rank: worker.global_rank for worker in worker_group.workers},
            context.error_files,
            signal_all=self._signal_all,
        )
        if self._watchdog is not None:
            global_ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            self._watchdog.start(self._ranks.pids, global_ranks, self.world_size)
        self.preempted = False
        self._lost = {}
        self._watching, self._stopping = True, False
        if in_main_thread:
            self._take_signals(before)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks, peers = self._running()
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
                peers.give_stacks(self._watchdog.describe(self._watchdog.report(ranks.alive())))
        watchdog = self._watchdog if not ranks.any_failed() else None
        if watchdog is not None and (reports := watchdog.poll(ranks.alive())) is not None:
            return self._end_hang(watchdog, reports)
        if ranks.any_failed():
            self._stopping = True
            ranks.await_deaths()
            if ranks.was_preempted():
                return self._end_preempted()
            if ranks.was_interrupted():
                ranks.wait(ranks.alive(), EXIT_PATIENCE)  # they may still be saving
            failures = ranks.failures()
            peers.publish(first_failure(failures) if failures else None)
            self._stop_peers(local for local in ranks.alive() if not ranks.is_failing(local))
            ranks.wait(ranks.alive(), EXIT_PATIENCE)
            ranks.kill(ranks.alive())
        elif self._record_lost(ranks):
            return self._without_lost(worker_group)
        elif ranks.alive() or not peers.all_done():
            return RunResult(state=WorkerState.HEALTHY)
        # Torch polls only now that all have ended: on a failure that it is the first to see, it waits
        # half a minute for peers that do not hear SIGTERM.
        self._watching = False
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            return self._failed()
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Also called when machines come or go, which is no failure.
        ranks, peers = self._running()
        if alive := ranks.alive():
            self._stopping = True
            if peers.failed_elsewhere():
                self._failed_attempts += 1
                ranks.kill(alive)
            else:
                self._save_and_end()
        self._watching = False
        self._raise_if_signalled()
        failure = None
        if ranks.was_preempted():
            failure = first_failure(ranks.failures())
        elif ranks.failures() or peers.failed_elsewhere():
            failure = self.first_failure(final=False)
        if failure is not None or self.lost_machines:
            self._on_restart(failure, self._failed_attempts)
        self.lost_machines = False
        ranks.end_what_they_left()
        self._raise_if_signalled()
        super()._restart_workers(worker_group)

    # ending

    def _running(self) -> tuple[LocalRanks, Peers]:
        assert self._ranks is not None
        assert self._peers is not None
        return self._ranks, self._peers

    def _failed(self) -> RunResult:
        """This attempt has failed. Torch's loop starts another where restarts are left."""
        self._watching = False
        self._failed_attempts += 1
        return RunResult(state=WorkerState.FAILED)

    def _record_lost(self, ranks: LocalRanks) -> bool:
        """Report ranks that are gone, and that the others can do without; whether there are any."""
        gone = {ranks.global_rank(local) for local in ranks.lost()}
        for failure in ranks.failures():
            if failure.rank in gone and failure.rank not in self._lost:
                self._lost[failure.rank] = failure
                self._on_loss(failure)
        return bool(self._lost)

    def _without_lost(self, worker_group: WorkerGroup) -> RunResult:
        """Let the ranks that are not lost run to their end."""
        ranks, peers = self._running()
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

    def _stop_peers(self, locals_: Any) -> None:
        """End ranks that another's failure leaves alone: at once where they start again, else asking them first."""
        self._running()[0].stop(locals_, patience=0.0 if self._remaining_restarts else STOP_PATIENCE)

    def _end_hang(self, watchdog: Watchdog, reports: list[RankReport]) -> RunResult:
        """End all ranks, of which one makes no progress."""
        ranks, peers = self._running()
        self._stopping = True
        ranks.hang = watchdog.failure(reports, peers.collect_stacks(watchdog.describe(reports)))
        peers.publish(ranks.hang)
        self._stop_peers(ranks.alive())
        return self._failed()

    def _end_preempted(self) -> RunResult:
        """One rank has saved and ended. The others, who agreed on the step, get the time to do the same."""
        _, peers = self._running()
        self._await_savers()
        self.preempted = True
        if self.received is None and self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0:
            # Asked to by another launcher, because machines have come: torch's loop starts the larger group.
            self._watching = False
            return RunResult(state=WorkerState.HEALTHY)
        leaving = self.received is not None or (not self._can_shrink and peers.any_stopping())
        return self._give_up() if leaving else self._failed()

    def _end_by_signal(self, number: signal.Signals) -> RunResult:
        ranks, peers = self._running()
        self.ended_by_signal = True
        peers.publish_stopping()
        ranks.forward(ranks.alive(), number)
        if number == signal.SIGINT:
            self._on_interrupt()
        self._await_savers(number)
        self.preempted = ranks.was_preempted()
        return self._give_up()

    def _save_and_end(self) -> None:
        """Let ranks save and end, because machines have come."""
        ranks, _ = self._running()
        ranks.forward(ranks.alive(), signal.SIGTERM)
        self._await_savers(signal.SIGTERM)

    def _await_savers(self, number: signal.Signals | None = None) -> None:
        """Wait for ranks that save and end; where one crashes meanwhile, the others cannot, and are ended."""
        ranks, _ = self._running()
        ranks.wait(ranks.alive(), self._grace_period, until=lambda: ranks.any_crashed(number))
        if ranks.any_crashed(number):
            ranks.stop(local for local in ranks.alive() if not ranks.is_failing(local))
            ranks.wait(ranks.alive(), EXIT_PATIENCE)
        else:
            # One that has recorded how it ends has saved; ending an interpreter with torch takes seconds under load.
            ranks.wait([local for local in ranks.alive() if ranks.is_failing(local)], EXIT_PATIENCE)
            self.overdue = [ranks.global_rank(local) for local in ranks.alive()]
        ranks.stopped.update(ranks.alive())
        ranks.kill(ranks.alive())

    # signals

    def _take_signals(self, before: dict[signal.Signals, Any]) -> None:
        """Put our handlers in the place of torch's, which raise wherever the program happens to be."""
        for number, handler in before.items():
            self._previous_handlers.setdefault(number, handler)
            # What was ignored stays so: `nohup drivetrain launch …` outlives its terminal.
            signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal for the next poll; a second Ctrl-C or SIGTERM kills."""
        again = number == signal.SIGTERM and number in self._seen
        self._seen.add(signal.Signals(number))
        again = again or (number == signal.SIGINT and (self.received is not None or self._stopping))
        if again and self._ranks is not None:
            self._ranks.send(self._ranks.alive(), signal.SIGKILL)
        if self.received is None:
            self.received = signal.Signals(number)
        if not self._watching:
            raise KeyboardInterrupt  # between two attempts, or waiting for other machines: nothing to end here

    def _raise_if_signalled(self) -> None:
        """Start nothing again once a signal has come."""
        if self.received is not None:
            raise KeyboardInterrupt
