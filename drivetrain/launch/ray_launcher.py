"""Runs a script on the workers of a Ray cluster: one rank a worker, where Ray places it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any

from drivetrain.launch.agent import EXIT_PATIENCE, FORWARDED_SIGNALS, STOP_PATIENCE, LocalRanks
from drivetrain.launch.interpreter import Invocation
from drivetrain.launch.options import THREADS_VARIABLE, LaunchOptions
from drivetrain.launch.report import (
    ERROR_FILE_VARIABLE,
    INTERRUPTED,
    RankFailure,
    announce,
    announce_restart,
    describe,
    exit_code_after,
    first_failure,
    resumable,
    write,
)
from drivetrain.runtime.errors import DeviceNotAvailableError, LaunchError
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE

# What a worker of Ray runs: one rank as a process beside it, with its output and how it ends


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Of the machine that a process is on: that of the launcher means nothing on another one.
_OF_A_MACHINE = ("HOSTNAME", "TMPDIR", "DISPLAY", VISIBLE_DEVICES)
_PREFIXES_OF_A_MACHINE = ("RAY_", "SLURM_", "OMPI_", "PMI_", "SSH_", "XDG_")
_INTERVAL = 0.02
_PIPE = 65536  # bytes


@dataclass(frozen=True)
class Place:
    """Where a worker is.

    Attributes:
        node: Ray's name of the machine.
        host: Its address.
        devices: The GPUs that Ray has given to the worker, by their ids on that machine.
    """

    node: str
    host: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """News of a rank.

    Attributes:
        output: What it has written since the last report: 1 or 2, for stdout or stderr, and bytes, in order.
        alive: Whether its process is there.
        failing: Whether it has ended, or is about to end, with another exit code than 0.
        failures: How it failed, if it failed by itself.
    """

    output: tuple[tuple[int, bytes], ...] = ()
    alive: bool = True
    failing: bool = False
    failures: tuple[RankFailure, ...] = ()


class Stream:
    """What a process writes to a pipe, in whole lines; the rest of a line once nothing follows it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lock = threading.Lock()
        self._written = b""
        self._taken_at = 0  # length of an unfinished line when it was last left here
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._reader.start()

    def take(self, *, last: bool = False) -> bytes:
        """What is there, up to the end of a line."""
        if last:
            self._reader.join(STOP_PATIENCE)  # a process that it has left behind may hold the pipe
        with self._lock:
            end = self._written.rfind(b"\n") + 1
            if last or len(self._written) - end == self._taken_at:
                end = len(self._written)  # such as a progress bar, which ends no line
            taken, self._written = self._written[:end], self._written[end:]
            self._taken_at = len(self._written)
        return taken

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _PIPE):
                with self._lock:
                    self._written += data
                while len(self._written) > 64 * _PIPE:
                    time.sleep(_INTERVAL)  # as with a full pipe, the rank waits until this is taken


class RayWorker:
    """One rank on one worker. Ray makes an actor of this class: calls are taken one after the other."""

    def __init__(self) -> None:
        self._ranks: LocalRanks | None = None
        self._streams: dict[int, Stream] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="drivetrain_", ignore_cleanup_errors=True)
        self._last = (True, False)

    def place(self) -> Place:
        """Where this worker is."""
        import ray
        from ray.util import get_node_ip_address

        context = ray.get_runtime_context()
        devices = tuple(context.get_accelerator_ids().get("GPU", ()))
        return Place(context.get_node_id(), get_node_ip_address(), devices)

    def free_port(self) -> int:
        """A port that nothing on this machine listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], directory: str, *, python: bool = True
    ) -> int:
        """Start the rank."""
        if not os.path.isdir(directory):
            raise LaunchError(
                f"{socket.gethostname()} has no directory {directory}. The script must be at the same path on every "
                "machine of the cluster, such as on a shared file system."
            )
        error_file = os.path.join(self._directory.name, "error.json")
        environment = environment_of_rank(variables, os.environ) | {ERROR_FILE_VARIABLE: error_file}
        # Ray's workers hear no SIGINT, and what they start would not either.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            process = subprocess.Popen(
                [sys.executable, *command] if python else list(command),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} could not be started on {socket.gethostname()}: {error}.") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdout is not None
        assert process.stderr is not None
        self._streams = {1: Stream(process.stdout), 2: Stream(process.stderr)}
        local, rank = int(variables["LOCAL_RANK"]), int(variables["RANK"])
        self._ranks = LocalRanks({local: process}, {local: rank}, {local: error_file}, signal_all=not python)
        return process.pid

    def poll(self, patience: float) -> Report:
        """Wait for news of the rank, for some seconds at most."""
        ranks = self._running()
        deadline = time.monotonic() + patience
        while True:
            ranks.poll()
            alive, failing = bool(ranks.alive()), ranks.any_failed()
            output = tuple((kind, data) for kind, each in self._streams.items() if (data := each.take(last=not alive)))
            if output or (alive, failing) != self._last or time.monotonic() >= deadline:
                self._last = (alive, failing)
                return Report(output, alive, failing, tuple(ranks.failures()))
            time.sleep(_INTERVAL)

    def forward(self, number: int) -> None:
        """Pass a signal on to the rank."""
        ranks = self._running()
        ranks.forward(ranks.alive(), signal.Signals(number))

    def stop(self, patience: float) -> None:
        """End the rank: ask it, then kill it."""
        ranks = self._running()
        ranks.stop(ranks.alive(), patience)

    def clean_up(self) -> None:
        """End what the rank has left behind."""
        if self._ranks is not None:
            self.stop(0)
            self._ranks.end_what_they_left()
        self._directory.cleanup()

    def _running(self) -> LocalRanks:
        assert self._ranks is not None
        return self._ranks


def environment_of_rank(given: Mapping[str, str], of_machine: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a rank."""
    environment = {**of_machine, **given}
    if environment.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del environment["PYTHONBREAKPOINT"]  # of Ray's workers alone
    return environment


def variables_to_pass_on(environ: Mapping[str, str], leave: Iterable[str] = ()) -> dict[str, str]:
    """What of the launcher's environment reaches ranks on other machines: all that is not about this machine."""
    left = {*_OF_A_MACHINE, *leave}
    return {
        name: value
        for name, value in environ.items()
        if name not in left and not name.startswith(_PREFIXES_OF_A_MACHINE)
    }


# A Ray cluster: reaching it, and reserving a worker for each rank. Ray is imported when a run asks for it


INSTALL = 'pip install "drivetrain[ray]"'
_CONNECT_PATIENCE = 5.0
_NOTICE_AFTER = 10.0  # seconds without the resources after which the user reads what is waited for
_RESERVE_TIMEOUT = 900.0  # seconds; an autoscaler may have to start machines
_CLEAN_UP_PATIENCE = 5.0
_CLUSTER_INTERVAL = 0.2


def import_ray() -> Any:
    """Ray itself."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise LaunchError(f"launcher='ray' needs Ray ({error}). Install it: {INSTALL}.") from None


@contextmanager
def connected(options: LaunchOptions) -> Iterator[Any]:
    """Connect to the cluster, or start one for this run; Ray, for as long as the context lasts."""
    ray = import_ray()
    address = options.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it is a run's own, not a cluster to report on
        wanted = (options.num_processes or 1) * cores_of_worker(options)
        settings |= {"num_cpus": max(os.cpu_count() or 1, wanted), "include_dashboard": False}
    elif address != "auto":
        _check_reachable(address)
    try:
        ray.init(address=address, **settings)
    except Exception as error:
        raise LaunchError(_unreachable(address, str(error) or type(error).__name__)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: Ray itself tries for minutes, and ends the process then."""
    if "://" in address:
        raise LaunchError(
            f"ray_address is {address!r}, but ranks cannot be started through Ray's client. Run the command on a "
            "machine of the cluster, with HOST:PORT or auto."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"ray_address is {address!r}, but must be HOST:PORT, such as 10.0.0.1:6379, auto or local.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_PATIENCE):
            pass
    except (OSError, OverflowError) as error:
        raise LaunchError(_unreachable(address, str(error))) from None


def _unreachable(address: str, reason: str) -> str:
    return (
        f"No Ray cluster could be reached at {address!r}: {' '.join(reason.split())}\n"
        "Start one (`ray start --head`), give its address with --ray_address HOST:PORT or RAY_ADDRESS, or let this "
        "launch start one with --ray_address local."
    )


def cores_of_worker(options: LaunchOptions) -> int:
    """Cores that each rank reserves, and threads that it computes with."""
    return options.num_cpu_threads_per_process or 1


def count_of_ranks(ray: Any, options: LaunchOptions) -> tuple[int, bool]:
    """How many ranks there are, and whether each gets a GPU."""
    devices = int(ray.cluster_resources().get("GPU", 0))
    on_devices = not options.cpu and (devices > 0 or options.multi_gpu)
    if options.num_processes is not None:
        return options.num_processes, on_devices
    if options.multi_gpu and devices == 0:
        raise DeviceNotAvailableError(
            "multi_gpu asks for one process a GPU, but the Ray cluster has none now. Give num_processes to wait for "
            "GPUs that it adds, or leave multi_gpu out to run on the CPU."
        )
    return (devices if on_devices else 1), on_devices


@contextmanager
def reserved(
    ray: Any, options: LaunchOptions, count: int, on_devices: bool, stopped: Callable[[], bool]
) -> Iterator[list[Any]]:
    """Reserve a worker for each rank, all of them at once, and give all back in the end."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needed: dict[str, float] = {"CPU": cores_of_worker(options)}
    if on_devices:
        needed["GPU"] = 1
    group = placement_group([needed] * count, strategy="PACK")
    workers: list[Any] = []
    try:
        if _await_resources(ray, options, group, needed, count, stopped):
            kind = ray.remote(RayWorker)
            for bundle in range(count):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                chosen = {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0), "max_restarts": 0}
                workers.append(kind.options(scheduling_strategy=where, **chosen).remote())
        yield workers
    finally:
        if workers:
            ray.wait([each.clean_up.remote() for each in workers], num_returns=count, timeout=_CLEAN_UP_PATIENCE)
        for each in workers:
            ray.kill(each)
        remove_placement_group(group)


def _await_resources(
    ray: Any, options: LaunchOptions, group: Any, needed: dict[str, float], count: int, stopped: Callable[[], bool]
) -> bool:
    """Wait until all are reserved; False where the wait was stopped."""
    begin = time.monotonic()
    limit = float(options.rendezvous_settings.get("timeout", _RESERVE_TIMEOUT))
    noticed = False
    while not group.wait(_CLUSTER_INTERVAL):
        waited = time.monotonic() - begin
        if stopped():
            return False
        if waited >= limit:
            raise LaunchError(
                f"Ray did not have {_amount(needed, count)} within {limit:g} s; it has {_has(ray)}. Ask for fewer "
                "(--num_processes, --num_cpu_threads_per_process), add machines, or wait longer with "
                f"--rdzv_conf timeout={limit * 2:g}."
            )
        if waited >= _NOTICE_AFTER and not noticed:
            announce(f"waiting until Ray has {_amount(needed, count)}; it has {_has(ray)}.")
            noticed = True
    return True


def _amount(needed: dict[str, float], count: int) -> str:
    each = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
    return f"{count} x {each} free"


def _has(ray: Any) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in ("CPU", "GPU"))


def in_order(places: list[Place]) -> list[int]:
    """The workers in the order of their ranks: those of a machine follow each other, by their devices."""
    nodes = list(dict.fromkeys(place.node for place in places))

    # By number where the ids are numbers: 10 comes after 9.
    def key(worker: int) -> tuple[int, list[tuple[int, str]], int]:
        place = places[worker]
        return nodes.index(place.node), [(len(name), name) for name in place.devices], worker

    return sorted(range(len(places)), key=key)


_WORKER = "drivetrain.launch.worker"
_LOOPBACK = "127.0.0.1"
_POLL_PATIENCE = 0.2  # seconds that a worker waits for news; a signal waits as long
_SETTLE = 0.5  # seconds for news of the other ranks, where one has failed: it may only have seen another's death


def launch_with_ray(options: LaunchOptions, script: str, args: Sequence[str] = ()) -> int:
    """Run a script as several processes on the workers of a Ray cluster, and wait for them.

    Each worker reserves cores and, where the cluster has any, one GPU. Ranks get the environment of this process but
    for what is about this machine, and run in the same directory.
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
    """The ranks of one attempt, each on a worker."""

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
        """Wait for the end of all; where one fails or a signal comes, end the others."""
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
            announce(INTERRUPTED)
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
        **options.variables,
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
    """What workers answer; nothing where the wait was stopped."""
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
