"""Launcher for Ray clusters, with one rank per Ray worker."""

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

# Ray actor of one rank


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Variables that describe the launcher's own machine and must not reach ranks on other machines.
_OF_A_MACHINE = ("HOSTNAME", "TMPDIR", "DISPLAY", VISIBLE_DEVICES)
_PREFIXES_OF_A_MACHINE = ("RAY_", "SLURM_", "OMPI_", "PMI_", "SSH_", "XDG_")
_INTERVAL = 0.02
_PIPE = 65536  # bytes


@dataclass(frozen=True)
class Place:
    """Machine and GPUs that Ray assigned to one rank's worker.

    Attributes:
        node: Ray's id of the machine.
        host: IP address of the machine.
        devices: Ids of the worker's GPUs on that machine.
    """

    node: str  # Ray's id of the machine
    host: str  # IP address
    devices: tuple[str, ...] = ()  # ids of the worker's GPUs


@dataclass(frozen=True)
class Report:
    output: tuple[tuple[int, bytes], ...] = ()  # in order: 1 for stdout or 2 for stderr, and the bytes
    alive: bool = True
    failing: bool = False  # the rank has exited or is about to exit with an error
    failures: tuple[RankFailure, ...] = ()


class Stream:
    def __init__(self, pipe: IO[bytes]) -> None:
        self._lock = threading.Lock()
        self._written = b""
        self._taken_at = 0  # length of the unfinished line at the previous call of `take`
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._reader.start()

    def take(self, *, last: bool = False) -> bytes:
        """Remove the complete lines of a process's output from the buffer, and return them.

        An unfinished line, such as a progress bar, is returned if it has not grown since the last call.

        With `last`, after the process has ended, everything is returned.
        """
        if last:
            self._reader.join(STOP_PATIENCE)  # an orphaned child process may keep the pipe open
        with self._lock:
            end = self._written.rfind(b"\n") + 1
            if last or len(self._written) - end == self._taken_at:
                end = len(self._written)  # output without a line end, such as a progress bar
            taken, self._written = self._written[:end], self._written[end:]
            self._taken_at = len(self._written)
        return taken

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _PIPE):
                with self._lock:
                    self._written += data
                while len(self._written) > 64 * _PIPE:
                    time.sleep(_INTERVAL)  # stop reading, so that the pipe fills up and the rank blocks


class RayWorker:
    """Ray actor that runs the script for one rank, in a child process."""

    def __init__(self) -> None:
        self._ranks: LocalRanks | None = None
        self._streams: dict[int, Stream] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="drivetrain_", ignore_cleanup_errors=True)
        self._last = (True, False)

    def place(self) -> Place:
        import ray
        from ray.util import get_node_ip_address

        context = ray.get_runtime_context()
        devices = tuple(context.get_accelerator_ids().get("GPU", ()))
        return Place(context.get_node_id(), get_node_ip_address(), devices)

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], directory: str, *, python: bool = True
    ) -> int:
        if not os.path.isdir(directory):
            raise LaunchError(
                f"{socket.gethostname()} has no folder {directory}. The script must have the same path on every "
                "machine of the cluster, such as on a shared file system."
            )
        error_file = os.path.join(self._directory.name, "error.json")
        environment = environment_of_rank(variables, os.environ) | {ERROR_FILE_VARIABLE: error_file}
        # Ray's workers block SIGINT, and child processes inherit the signal mask.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            process = subprocess.Popen(
                [sys.executable, *command] if python else list(command),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # signals can then reach the rank with all of its child processes
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
        ranks = self._running()
        ranks.forward(ranks.alive(), signal.Signals(number))

    def stop(self, patience: float) -> None:
        ranks = self._running()
        ranks.stop(ranks.alive(), patience)

    def clean_up(self) -> None:
        if self._ranks is not None:
            self.stop(0)
            self._ranks.end_orphans()
        self._directory.cleanup()

    def _running(self) -> LocalRanks:
        assert self._ranks is not None
        return self._ranks


def environment_of_rank(given: Mapping[str, str], of_machine: Mapping[str, str]) -> dict[str, str]:
    environment = {**of_machine, **given}
    if environment.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del environment["PYTHONBREAKPOINT"]  # Ray's debugger works in its own workers only
    return environment


def variables_to_pass_on(environ: Mapping[str, str], leave: Iterable[str] = ()) -> dict[str, str]:
    left = {*_OF_A_MACHINE, *leave}
    return {
        name: value
        for name, value in environ.items()
        if name not in left and not name.startswith(_PREFIXES_OF_A_MACHINE)
    }


# Ray cluster


INSTALL = 'pip install "drivetrain[ray]"'
_CONNECT_PATIENCE = 5.0
_NOTICE_AFTER = 10.0  # seconds after which a message says which resources are missing
_RESERVE_TIMEOUT = 900.0  # seconds; an autoscaler may have to start machines
_CLEAN_UP_PATIENCE = 5.0
_CLUSTER_INTERVAL = 0.2


def import_ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise LaunchError(f"launcher='ray' needs Ray ({error}). Install it: {INSTALL}.") from None


@contextmanager
def connected(options: LaunchOptions) -> Iterator[Any]:
    """Connect to a Ray cluster, or start one on this machine, for the `with` block."""
    ray = import_ray()
    address = options.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a temporary cluster should not report usage
        wanted = (options.num_processes or 1) * cores_of_worker(options)
        # Declare as many cores as the ranks reserve, or the reservation would never be fulfilled.
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
    """Raise a `LaunchError` if there is no Ray cluster at the address.

    Ray itself retries for minutes and then kills the process.
    """
    if "://" in address:
        raise LaunchError(
            f"ray_address is {address!r}, but Ray's client cannot start ranks. Run the command on a machine of the "
            "cluster, with HOST:PORT or auto."
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
        f"No Ray cluster is reachable at {address!r}: {' '.join(reason.split())}\n"
        "Start one (`ray start --head`), pass its address with --ray_address HOST:PORT or RAY_ADDRESS, or start one "
        "for this launch with --ray_address local."
    )


def cores_of_worker(options: LaunchOptions) -> int:
    return options.num_cpu_threads_per_process or 1


def count_of_ranks(ray: Any, options: LaunchOptions) -> tuple[int, bool]:
    devices = int(ray.cluster_resources().get("GPU", 0))
    on_devices = not options.cpu and (devices > 0 or options.multi_gpu)
    if options.num_processes is not None:
        return options.num_processes, on_devices
    if options.multi_gpu and devices == 0:
        raise DeviceNotAvailableError(
            "multi_gpu starts one process per GPU, but the Ray cluster has no GPU now. Set num_processes to wait for "
            "GPUs that are added, or remove multi_gpu to run on the CPU."
        )
    return (devices if on_devices else 1), on_devices


@contextmanager
def reserved(
    ray: Any, options: LaunchOptions, count: int, on_devices: bool, stopped: Callable[[], bool]
) -> Iterator[list[Any]]:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needed: dict[str, float] = {"CPU": cores_of_worker(options)}
    if on_devices:
        needed["GPU"] = 1
    # PACK uses as few machines as possible.
    group = placement_group([needed] * count, strategy="PACK")
    workers: list[Any] = []
    try:
        if _await_resources(ray, options, group, needed, count, stopped):
            kind = ray.remote(RayWorker)
            for bundle in range(count):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                chosen = {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0), "max_restarts": 0}
                workers.append(kind.options(scheduling_strategy=where, **chosen).remote())
        # empty if a signal stopped the wait for free resources
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
    begin = time.monotonic()
    limit = float(options.rendezvous_settings.get("timeout", _RESERVE_TIMEOUT))
    noticed = False
    while not group.wait(_CLUSTER_INTERVAL):
        waited = time.monotonic() - begin
        if stopped():
            return False
        if waited >= limit:
            raise LaunchError(
                f"Ray did not have {_amount(needed, count)} within {limit:g} s, but only {_has(ray)}. Request fewer "
                "processes or CPU threads (--num_processes, --num_cpu_threads_per_process), add machines, or wait "
                f"longer with --rdzv_conf timeout={limit * 2:g}."
            )
        if waited >= _NOTICE_AFTER and not noticed:
            announce(f"waiting until Ray has {_amount(needed, count)}. It has {_has(ray)}.")
            noticed = True
    return True


def _amount(needed: dict[str, float], count: int) -> str:
    each = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
    return f"{count} x {each} free"


def _has(ray: Any) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in ("CPU", "GPU"))


def rank_order(places: list[Place]) -> list[int]:
    nodes = list(dict.fromkeys(place.node for place in places))

    # Sort ids by length first, so that 10 comes after 9.
    def key(worker: int) -> tuple[int, list[tuple[int, str]], int]:
        place = places[worker]
        return nodes.index(place.node), [(len(name), name) for name in place.devices], worker

    return sorted(range(len(places)), key=key)


_WORKER = "drivetrain.launch.worker"
_LOOPBACK = "127.0.0.1"
_POLL_PATIENCE = 0.2  # seconds that a worker waits for a change, which is also the delay of a signal
_SETTLE = 0.5  # seconds to wait for other failures, since the first detected one may be a consequence


def launch_with_ray(options: LaunchOptions, script: str, args: Sequence[str] = ()) -> int:
    """Run a script on a Ray cluster, and return the run's exit code.

    Each worker reserves cores and, if the cluster has GPUs, one GPU. Ranks inherit this process's working directory and
    environment, except for variables that describe this machine.
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
    def __init__(self, ray: Any, workers: Sequence[Any]) -> None:
        self._ray = ray
        self._workers = list(workers)
        self._pending = {worker.poll.remote(0.0): rank for rank, worker in enumerate(self._workers)}
        self._reports = [Report() for _ in self._workers]
        self.overdue: list[int] = []

    @property
    def size(self) -> int:
        return len(self._workers)

    def alive(self) -> list[int]:
        return [rank for rank, report in enumerate(self._reports) if report.alive]

    def failures(self) -> list[RankFailure]:
        return [failure for report in self._reports for failure in report.failures]

    def first_failure(self) -> RankFailure | None:
        return first_failure(self.failures()) if self.failures() else None

    def succeeded(self) -> bool:
        return not any(report.alive or report.failing for report in self._reports)

    def preempted(self) -> bool:
        failure = self.first_failure()
        return failure is not None and failure.exit_code == RESUME_EXIT_CODE

    def watch(self, options: LaunchOptions, signals: Sequence[signal.Signals]) -> RankFailure | None:
        while self.alive():
            self.poll()
            if signals:
                self._end_by_signal(options, signals)
            elif any(report.failing for report in self._reports):
                self._end_failed(options, signals)
        return self.first_failure()

    def poll(self) -> None:
        # Wait for one report, then take all others that are ready as well.
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
        deadline = time.monotonic() + patience
        while self.alive() and time.monotonic() < deadline and not until():
            self.poll()

    def _stop(self, patience: float) -> None:
        for rank in self.alive():
            if patience == 0 or not self._reports[rank].failing:
                self._workers[rank].stop.remote(patience)

    def _end_failed(self, options: LaunchOptions, signals: Sequence[signal.Signals]) -> None:
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
        for rank in self.alive():
            self._workers[rank].forward.remote(int(signals[0]))
        if signals[0] == signal.SIGINT:
            announce(INTERRUPTED)
        self.wait(options.preemption_grace_period, until=lambda: len(signals) > 1 or self._crashed())
        if len(signals) == 1 and not self._crashed():
            # Ranks with a final record have saved, and only their interpreters have to exit.
            self.wait(EXIT_PATIENCE, until=lambda: not any(self._reports[rank].failing for rank in self.alive()))
            self.overdue = self.alive()
        self._kill()

    def _crashed(self) -> bool:
        return any(failure.text for failure in self.failures())

    def _kill(self) -> None:
        self._stop(0)
        self.wait(EXIT_PATIENCE)
        for rank in self.alive():  # ranks whose worker does not answer
            self._reports[rank] = Report(alive=False, failing=True)


def _start(
    ray: Any, options: LaunchOptions, workers: list[Any], script: list[str], attempt: int, stopped: Callable[[], bool]
) -> RayRanks | None:
    places = _results(ray, [worker.place.remote() for worker in workers], stopped)
    if not places:
        return None
    order = rank_order(places)
    workers, places = [workers[i] for i in order], [places[i] for i in order]
    port = _results(ray, [workers[0].free_port.remote()], stopped)
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
        for worker, own in zip(workers, variables_of_ranks(places), strict=True)
    ]
    if options.debug:
        for rank, place in enumerate(places):
            announce(f"rank {rank} on {place.host}, devices: {', '.join(place.devices) or 'the CPU'}")
    return RayRanks(ray, workers) if _results(ray, started, stopped) else None


def _command(options: LaunchOptions, script: list[str]) -> list[str]:
    if options.no_python:
        return script
    kind = "module" if options.module else "script"
    return [*Invocation.parse().options, "-m", _WORKER, kind, *script]


def variables_of_ranks(places: Sequence[Place]) -> Iterator[dict[str, str]]:
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
        # As with other launchers, a rank sees the devices of all ranks on its machine, and uses the one at its local
        # rank.
        devices = [device for other in peers for device in places[other].devices]
        yield own | ({VISIBLE_DEVICES: ",".join(devices)} if devices else {})


def _results(ray: Any, calls: list[Any], stopped: Callable[[], bool]) -> list[Any]:
    while len(ray.wait(calls, num_returns=len(calls), timeout=_POLL_PATIENCE)[0]) < len(calls):
        if stopped():
            return []
    try:
        answers: list[Any] = ray.get(calls)
    except LaunchError as error:  # Ray adds the worker's traceback to the message
        raise LaunchError(str(getattr(error, "cause", error))) from None
    except ray.exceptions.RayError as error:
        raise LaunchError(
            f"A Ray worker could not start: {error}\nCheck that drivetrain is installed on the workers."
        ) from None
    return answers


def _lost(rank: int, error: Exception) -> RankFailure:
    text = f"Its Ray worker died: the machine failed, or Ray or the system killed the worker. {error}"
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
    received: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
