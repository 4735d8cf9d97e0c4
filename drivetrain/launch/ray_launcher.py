"""Runs a script on the workers of a Ray cluster: one rank a worker, where Ray places it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from drivetrain.launch.cores import THREADS_VARIABLE
from drivetrain.launch.interpreter import Invocation
from drivetrain.launch.messages import announce, announce_restart, exit_code_after, resumable, write
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.ranks import EXIT_PATIENCE, FORWARDED_SIGNALS, STOP_PATIENCE
from drivetrain.launch.ray_cluster import connected, cores_of_worker, count_of_ranks, in_order, reserved
from drivetrain.launch.ray_worker import VISIBLE_DEVICES, Place, Report, variables_to_pass_on
from drivetrain.launch.report import RankFailure, describe, first_failure
from drivetrain.launch.variables import variables_of_run
from drivetrain.runtime.errors import LaunchError
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE

_WORKER = "drivetrain.launch.worker"
_LOOPBACK = "127.0.0.1"
_POLL_PATIENCE = 0.2  # seconds that a worker waits for news; a signal waits as long
_SETTLE = 0.5  # seconds for news of the other ranks, where one has failed: it may only have seen another's death


def launch_with_ray(options: LaunchOptions, script: str, args: Sequence[str] = ()) -> int:
    """Run a script as several processes on the workers of a Ray cluster, and wait for them.

    Each worker reserves cores and, where the cluster has any, one GPU. Ranks get the environment of this process but
    for what is about this machine, and run in the same directory.

    Args:
        options: How many processes, on which cluster, and with which settings.
        script: The script's path, or a module's or program's name if the options ask for that.
        args: Its arguments, passed on as they are.

    Returns:
        The exit code, as `launch_script` has it.

    Raises:
        LaunchError: Ray is not installed, the cluster cannot be reached or has too little, or a worker cannot start.
        DeviceNotAvailableError: GPUs were asked for where there are none.
    """
    with connected(options) as ray, _signals() as signals:
        count, on_devices = count_of_ranks(ray, options)
        for attempt in range(options.max_restarts + 1):
            with reserved(ray, options, count, on_devices, lambda: bool(signals)) as workers:
                ranks = _start(ray, options, workers, [script, *args], attempt, lambda: bool(signals))
                failure = ranks.watch(options, signals) if ranks is not None else None
                if signals:
                    return _after_signals(options, signals, ranks)
            if failure is None:
                return 0
            if attempt < options.max_restarts:
                announce_restart(failure, count, attempt + 1, options.max_restarts)
            elif failure.exit_code == RESUME_EXIT_CODE:
                return resumable()
            else:
                write(describe(failure, count, debug=options.compares_calls))
                return failure.status
    raise AssertionError("unreachable")


class RayRanks:
    """The ranks of one attempt, each on a worker.

    Args:
        ray: Ray, connected.
        workers: Its handle of each worker, by rank.
    """

    def __init__(self, ray: Any, workers: Sequence[Any]) -> None:
        self._ray = ray
        self._workers = list(workers)
        self._pending = {worker.poll.remote(0.0): rank for rank, worker in enumerate(self._workers)}
        self._reports = [Report() for _ in self._workers]
        self.overdue: list[int] = []

    @property
    def size(self) -> int:
        """Processes of the run."""
        return len(self._workers)

    def alive(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank, report in enumerate(self._reports) if report.alive]

    def failures(self) -> list[RankFailure]:
        """The ranks that failed by themselves."""
        return [failure for report in self._reports for failure in report.failures]

    def first_failure(self) -> RankFailure | None:
        """The one that failed first."""
        return first_failure(self.failures()) if self.failures() else None

    def succeeded(self) -> bool:
        """Whether all have ended with exit code 0."""
        return not any(report.alive or report.failing for report in self._reports)

    def preempted(self) -> bool:
        """Whether the first rank to end by itself reported that the run has saved and can be resumed."""
        failure = self.first_failure()
        return failure is not None and failure.exit_code == RESUME_EXIT_CODE

    def watch(self, options: LaunchOptions, signals: Sequence[signal.Signals]) -> RankFailure | None:
        """Wait for the end of all; where one fails or a signal comes, end the others.

        Args:
            options: What was asked for.
            signals: Those that have come, which grows.

        Returns:
            The first failure; None where there is none.
        """
        while self.alive():
            self.poll()
            if signals:
                self._end_by_signal(options, signals)
            elif any(report.failing for report in self._reports):
                self._end_failed(options, signals)
        return self.first_failure()

    def poll(self) -> None:
        """Take the news of all workers that have some, and write what their ranks have written."""
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=_POLL_PATIENCE)
        more, _ = self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for news in {*ready, *more}:
            rank = self._pending.pop(news)
            try:
                report = self._ray.get(news)
            except self._ray.exceptions.RayError as error:
                report = Report((), alive=False, failing=True, failures=(_lost(rank, error),))
            for kind, data in report.output:
                stream = sys.stdout if kind == 1 else sys.stderr
                stream.buffer.write(data)
                stream.flush()
            self._reports[rank] = report
            if report.alive:
                self._pending[self._workers[rank].poll.remote(_POLL_PATIENCE)] = rank

    def wait(self, patience: float, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for all to end, for some seconds, or until something else is true."""
        deadline = time.monotonic() + patience
        while self.alive() and time.monotonic() < deadline and not until():
            self.poll()

    def _stop(self, patience: float) -> None:
        for rank in self.alive():
            if patience == 0 or not self._reports[rank].failing:
                self._workers[rank].stop.remote(patience)

    def _end_failed(self, options: LaunchOptions, signals: Sequence[signal.Signals]) -> None:
        """One has failed: give the others the time that their end takes, and end them."""
        self.wait(_SETTLE)
        failure = self.first_failure()
        code = failure.exit_code if failure is not None else 1
        if code == RESUME_EXIT_CODE:
            self.wait(options.preemption_grace_period, until=lambda: bool(signals))
        elif code == 128 + signal.SIGINT:
            self.wait(EXIT_PATIENCE)
        self._stop(STOP_PATIENCE)
        self.wait(EXIT_PATIENCE)
        self._kill()

    def _end_by_signal(self, options: LaunchOptions, signals: Sequence[signal.Signals]) -> None:
        """Pass the first signal on, once, and wait; a second one kills."""
        for rank in self.alive():
            self._workers[rank].forward.remote(int(signals[0]))
        if signals[0] == signal.SIGINT:
            announce("interrupted: the processes are ending; Ctrl-C again kills them.")
        self.wait(options.preemption_grace_period, until=lambda: len(signals) > 1 or self._crashed())
        if len(signals) == 1 and not self._crashed():
            # Those that have recorded how they end have saved, and only their interpreters are left to end.
            self.wait(EXIT_PATIENCE, until=lambda: not any(self._reports[rank].failing for rank in self.alive()))
            self.overdue = self.alive()
        self._kill()

    def _crashed(self) -> bool:
        """Whether one has raised, so that the others, which may wait for it, cannot end by themselves."""
        return any(failure.text for failure in self.failures())

    def _kill(self) -> None:
        self._stop(0)
        self.wait(EXIT_PATIENCE)
        for rank in self.alive():  # its worker does not answer
            self._reports[rank] = Report(alive=False, failing=True)


def _start(
    ray: Any, options: LaunchOptions, workers: list[Any], script: list[str], attempt: int, stopped: Callable[[], bool]
) -> RayRanks | None:
    """Start the rank of each worker; None where a signal came before all were there."""
    places = _answers(ray, [worker.place.remote() for worker in workers], stopped)
    if not places:
        return None
    order = in_order(places)
    workers, places = [workers[i] for i in order], [places[i] for i in order]
    port = _answers(ray, [workers[0].free_port.remote()], stopped)
    if not port:
        return None
    several = len({place.node for place in places}) > 1
    meeting = {"MASTER_ADDR": places[0].host if several else _LOOPBACK, "MASTER_PORT": str(port[0])}
    shared = {
        **variables_to_pass_on(os.environ),
        **variables_of_run(options),
        **meeting,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    if options.num_cpu_threads_per_process is not None or THREADS_VARIABLE not in os.environ:
        shared[THREADS_VARIABLE] = str(cores_of_worker(options))
    command = _command(options, script)
    started = [
        worker.start.remote(command, {**shared, **own}, os.getcwd(), python=not options.no_python)
        for worker, own in zip(workers, places_of_ranks(places), strict=True)
    ]
    if options.debug:
        for rank, place in enumerate(places):
            announce(f"rank {rank} on {place.host}, devices: {', '.join(place.devices) or 'the CPU'}")
    return RayRanks(ray, workers) if _answers(ray, started, stopped) else None


def _command(options: LaunchOptions, script: list[str]) -> list[str]:
    if options.no_python:
        return script
    kind = "module" if options.module else "script"
    return [*Invocation.current().options, "-m", _WORKER, kind, *script]


def places_of_ranks(places: Sequence[Place]) -> Iterator[dict[str, str]]:
    """The variables by which each rank finds its place, and the devices of its machine that it sees.

    A rank sees the devices of all ranks of its machine, its own at its local rank, as under the other launchers.

    Args:
        places: Where each rank is, by rank; those of a machine follow each other.
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    for rank, place in enumerate(places):
        peers = [other for other in range(len(places)) if places[other].node == place.node]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": peers.index(rank),
            "LOCAL_WORLD_SIZE": len(peers),
            "GROUP_RANK": nodes.index(place.node),
            "GROUP_WORLD_SIZE": len(nodes),
        }
        own = {name: str(value) for name, value in variables.items()}
        devices = [device for other in peers for device in places[other].devices]
        yield own | ({VISIBLE_DEVICES: ",".join(devices)} if devices else {})


def _answers(ray: Any, calls: list[Any], stopped: Callable[[], bool]) -> list[Any]:
    """What workers answer; nothing where the wait was stopped.

    Raises:
        LaunchError: A worker could not start, or has refused.
    """
    while len(ray.wait(calls, num_returns=len(calls), timeout=_POLL_PATIENCE)[0]) < len(calls):
        if stopped():
            return []
    try:
        answers: list[Any] = ray.get(calls)
    except LaunchError as error:  # what a worker raised, as Ray hands it on: with its traceback in the message
        raise LaunchError(str(getattr(error, "cause", error))) from None
    except ray.exceptions.RayError as error:
        raise LaunchError(
            f"A worker of Ray could not start: {error}\nCheck that drivetrain is installed where Ray's workers run."
        ) from None
    return answers


def _lost(rank: int, error: Exception) -> RankFailure:
    """The failure of a rank whose worker is gone."""
    text = f"Its worker is gone, with its machine or killed by Ray or the system: {error}"
    return RankFailure(rank, 0, 0, 1, time.time(), text, socket.gethostname())


def _after_signals(options: LaunchOptions, signals: Sequence[signal.Signals], ranks: RayRanks | None) -> int:
    failure = ranks.first_failure() if ranks is not None else None
    preempted = ranks is not None and ranks.preempted()
    return exit_code_after(
        signals[0],
        overdue=ranks.overdue if ranks is not None else (),
        grace_period=options.preemption_grace_period,
        preempted=preempted,
        succeeded=ranks is not None and ranks.succeeded(),
        described=describe(failure, ranks.size) if ranks is not None and failure is not None and failure.text else "",
    )


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """The signals that ask this process to end, as they come."""
    received: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
