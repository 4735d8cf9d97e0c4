"""A warm pool for tests that need several real processes.

Starting an interpreter and importing torch costs seconds, forking a process that has done so costs milliseconds. So one
server process per test session imports torch and drivetrain, computes nothing (a process that has started OpenMP or
autograd threads must not fork), and forks fresh processes for every call:

    from tests.pool import run_in_processes

    def sum_of_ranks() -> int:
        state = PartialState()
        return int(reduce(torch.tensor(state.process_index), reduction="sum"))

    def test_every_rank_sees_the_sum() -> None:
        assert run_in_processes(sum_of_ranks, world_size=3) == [3, 3, 3]

A rank that raises or dies fails the test with its traceback and output, and the others are stopped. Past the time-out every
rank is killed, and the failure says which were still running and where. Nothing outlives a call, nor the session, not
even one that was killed.

What real launches have and this has not: all ranks share one hash seed, since they are forks of one process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import io
import os
import pickle
import pkgutil
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# After one rank has failed, the others have this long to say what they saw before they are killed.
GRACE_SECONDS = 1.0
# A rank writes where it hangs from a C signal handler: at once, unless the machine is very busy.
DUMP_SECONDS = 0.5
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (1 if hasattr(signal, "SIGRTMAX") else 0)
# Below the range that Linux gives to outgoing connections, so that nothing takes a port between choice and use.
PORTS = range(15_000, 32_000)


class ProcessesFailed(AssertionError):
    """One rank or more raised, died or did not end in time.

    Attributes:
        ranks: Those that raised or died of themselves, in the order in which they did.
        hung: Those still running at the time-out.
        tracebacks: What each rank raised, or how it died, or where it hung.
        outputs: What each rank wrote to stdout and stderr.
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        failed = sorted((one for one in outcomes if one.status == "failed"), key=lambda one: one.ended)
        self.ranks = [one.rank for one in failed]
        self.hung = [one.rank for one in outcomes if one.status == "hung"]
        self.tracebacks = {one.rank: one.traceback for one in outcomes if one.traceback}
        self.outputs = {one.rank: one.output for one in outcomes}


@dataclass
class Request:
    """What to run: the call is pickled by value here and read only in the forked processes."""

    call: bytes
    world_size: int
    timeout: float
    environment: dict[str, str]
    directory: str
    path: list[str]


@dataclass
class Outcome:
    """How one rank ended: `status` is done, failed, hung (at the time-out) or stopped (another rank had failed)."""

    rank: int
    status: str = "stopped"
    value: bytes = b""
    traceback: str = ""
    output: str = ""
    ended: float = 0.0


def run_in_processes(
    function: Callable[..., Any],
    world_size: int = 2,
    args: Sequence[Any] = (),
    timeout: float = 60,
    *,
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Run a function in fresh processes of one world and return what each rank returned.

    The ranks see the test's environment, working directory and `sys.path`, RANK and its companions, and
    DRIVETRAIN_USE_CPU=1. What they print is printed again here, in rank order, so `capsys` sees it.

    Args:
        function: Callable that can be pickled by reference: defined at the top of a module.
        world_size: How many processes.
        args: Positional arguments, the same for every rank. Tensors travel by value.
        timeout: Seconds after which all are killed.
        kwargs: Keyword arguments, the same for every rank.
        env: Environment variables to set, or to remove where the value is None.

    Returns:
        The return values in rank order.

    Raises:
        ProcessesFailed: A rank raised, died or was still running at the time-out.
    """
    __tracebackhide__ = True
    try:
        call = pickle.dumps((function, tuple(args), dict(kwargs or {})))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_in_processes got {function!r}, which cannot be sent to another process ({error}). "
            "Give a function defined at the top of a module and arguments that pickle."
        ) from None
    environment = dict(os.environ)
    environment.setdefault("DRIVETRAIN_USE_CPU", "1")
    for name, value in (env or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    request = Request(call, world_size, timeout, environment, os.getcwd(), list(sys.path))
    outcomes = _shared_server().run(request)
    problem = _describe(outcomes, getattr(function, "__qualname__", repr(function)), timeout)
    if problem:
        raise ProcessesFailed(problem, outcomes)
    for outcome in outcomes:
        sys.stdout.write(outcome.output)
    return [pickle.loads(outcome.value) for outcome in outcomes]


def stop() -> None:
    """End the server of this session, if there is one, and with it all that it started."""
    server = _server.pop("running", None)
    if server is not None:
        server.stop()


def _describe(outcomes: Sequence[Outcome], name: str, timeout: float) -> str:
    """Tell what went wrong, the first cause first; empty if nothing did."""
    failed = sorted((one for one in outcomes if one.status == "failed"), key=lambda one: one.ended)
    hung = [one for one in outcomes if one.status == "hung"]
    if not failed and not hung:
        return ""
    text = io.StringIO()
    if failed:
        ranks = ", ".join(str(one.rank) for one in failed)
        text.write(f"{name} failed on rank {ranks} of {len(outcomes)} processes")
        if hung:
            text.write(f"; rank {', '.join(str(one.rank) for one in hung)} still ran after {timeout:g} s")
    else:
        ranks = ", ".join(str(one.rank) for one in hung)
        text.write(f"{name} still ran after {timeout:g} s on rank {ranks} of {len(outcomes)} processes")
    text.write("\n")
    for one in (*failed, *hung):
        heading = "failed" if one.status == "failed" else "still ran here when it was killed"
        text.write(f"\n--- rank {one.rank} {heading} ---\n{one.traceback.rstrip()}\n")
    for one in outcomes:
        if one.output.strip():
            text.write(f"\n--- output of rank {one.rank} ({one.status}) ---\n{one.output.rstrip()}\n")
    return text.getvalue()


# The test's side -----------------------------------------------------------------------------------------------------

_server: dict[str, _Server] = {}


def _shared_server() -> _Server:
    server = _server.get("running")
    if server is None or not server.is_alive():
        stop()
        server = _server["running"] = _Server()
    return server


class _Server:
    """The server process as the test session sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.pool import _serve; _serve({theirs.fileno()}, {os.getpid()})"],
            cwd=ROOT,
            # The second variable keeps a question about CUDA from initialising it before the fork.
            env={**os.environ, **one_thread, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        try:
            self.threads: int = self._receive(120)
        except BaseException:
            self.stop()
            raise

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def run(self, request: Request) -> list[Outcome]:
        try:
            self.connection.send_bytes(pickle.dumps(request))
            outcomes: list[Outcome] = self._receive(request.timeout + 30)
        except BaseException:
            # Whatever ended the wait (a time-out of pytest's, Ctrl-C), the ranks of this call must not stay.
            stop()
            raise
        return outcomes

    def stop(self) -> None:
        self.connection.close()  # the server kills what it started, then ends
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def _receive(self, seconds: float) -> Any:
        try:
            if self.connection.poll(seconds):
                return pickle.loads(self.connection.recv_bytes())
            cause = f"did not answer within {seconds:g} s"
        except (EOFError, ConnectionError):
            cause = "ended"
        self.log.seek(0)
        raise RuntimeError(f"the server of the process pool {cause}:\n{self.log.read().decode(errors='replace')}")


atexit.register(stop)


# The server's side ---------------------------------------------------------------------------------------------------


def _serve(descriptor: int, session: int) -> None:
    _die_with_parent(session)
    _adopt_orphans()
    connection = Connection(descriptor)
    _warm_up()
    connection.send_bytes(pickle.dumps(_count_threads()))
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        with _Run(request, connection) as run:
            outcomes = run.watch()
        connection.send_bytes(pickle.dumps(outcomes))


def _warm_up() -> None:
    """Import what the ranks will need; run nothing of it."""
    import torch

    torch.set_num_threads(1)
    for name in (
        "torch._dynamo",  # the first optimizer step imports it otherwise, more than a second in every rank
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.nn.parallel",
        "torch.utils.data",
        "torchmetrics",
        "pytest",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import drivetrain

    for module in pkgutil.walk_packages(drivetrain.__path__, "drivetrain.", onerror=lambda name: None):
        if module.name.endswith("__main__"):
            continue
        # A module that needs an extra, or that is broken: the rank that imports it will see the error.
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)
    with contextlib.suppress(Exception):
        _explain_assertions()


def _explain_assertions() -> None:
    """Let a bare `assert a == b` in a rank say what `a` and `b` were, as it does in a test."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    config = get_config()
    config.parse([f"--rootdir={ROOT}", "-p", "no:cacheprovider", "--assert=plain", str(ROOT / "tests" / "pool.py")])
    install_importhook(config)


@dataclass
class _Rank:
    """A forked process as the server sees it."""

    rank: int
    pid: int
    pipe: int
    output: Any
    stack: Any
    received: bytearray = field(default_factory=bytearray)
    exit_status: int | None = None


class _Run:
    """One call: forks the ranks, watches them, and leaves none behind."""

    def __init__(self, request: Request, connection: Connection) -> None:
        self.request = request
        self.connection = connection
        self.outcomes = [Outcome(rank) for rank in range(request.world_size)]
        self.running: dict[int, _Rank] = {}

    def __enter__(self) -> _Run:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            environment[name] = str(self.request.world_size)
        for rank in range(self.request.world_size):
            self.running[rank] = self._fork(rank, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in list(self.running.values()):
            self._end(rank)
        _kill_descendants()

    def watch(self) -> list[Outcome]:
        deadline = time.monotonic() + self.request.timeout
        reason = "hung"
        while self.running:
            now = time.monotonic()
            if now >= deadline:
                self._stop_all(reason)
                break
            waiting = [self.connection, *(rank.pipe for rank in self.running.values())]
            # Not only on the pipes: a worker of a rank that was killed may hold the pipe open.
            readable, _, _ = select.select(waiting, [], [], min(0.02, deadline - now))
            if self.connection in readable and not self.connection.closed:
                self._stop_all("stopped")  # the session has gone
                os._exit(1)
            for rank in list(self.running.values()):
                self._read(rank)
                if self._has_ended(rank):
                    self._read(rank)
                    outcome = self._settle(rank)
                    if outcome.status == "failed" and reason == "hung":
                        reason = "stopped"
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return self.outcomes

    def _fork(self, rank: int, environment: dict[str, str]) -> _Rank:
        read_end, write_end = os.pipe()
        output, stack = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(read_end)
                os.close(self.connection.fileno())
                _be_a_rank(self.request, environment, write_end, output.fileno(), stack.fileno(), server)
                status = 0
            finally:
                os._exit(status)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here as well as there: whoever comes first
        os.close(write_end)
        os.set_blocking(read_end, False)
        return _Rank(rank, pid, read_end, output, stack)

    def _read(self, rank: _Rank) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(rank.pipe, 1 << 20):
                rank.received += chunk

    def _has_ended(self, rank: _Rank) -> bool:
        if rank.exit_status is None:
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                rank.exit_status = os.waitstatus_to_exitcode(status)
        return rank.exit_status is not None

    def _settle(self, rank: _Rank) -> Outcome:
        """Read how a rank that has ended fared."""
        outcome = self.outcomes[rank.rank]
        outcome.ended = time.monotonic()
        if rank.received:
            outcome.status, outcome.value, outcome.traceback = pickle.loads(bytes(rank.received))
        else:
            status = rank.exit_status or 0
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
            outcome.status, outcome.traceback = "failed", f"The process {how} before its function returned."
        self._end(rank)
        return outcome

    def _stop_all(self, status: str) -> None:
        """Ask those still running where they are, then kill them."""
        for rank in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, DUMP_SIGNAL)
        until = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < until and any(os.fstat(r.stack.fileno()).st_size == 0 for r in self.running.values()):
            time.sleep(0.01)
        time.sleep(0.05)
        for rank in list(self.running.values()):
            outcome = self.outcomes[rank.rank]
            outcome.status, outcome.traceback = status, _contents(rank.stack)
            self._end(rank)

    def _end(self, rank: _Rank) -> None:
        """Kill a rank with its workers, whether or not it has ended, and collect what it wrote."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        if rank.exit_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            rank.exit_status = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
        self.outcomes[rank.rank].output = _contents(rank.output)
        os.close(rank.pipe)
        rank.output.close()
        rank.stack.close()
        del self.running[rank.rank]


def _contents(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def _free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, 200):
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
    raise RuntimeError(f"No free port among 200 tried in {PORTS}: what else runs on this machine?")


def _kill_descendants() -> None:
    """Kill what a rank left in a process group of its own: orphans come to this process."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent(parent: int) -> None:
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _adopt_orphans() -> None:
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


# A rank's side -------------------------------------------------------------------------------------------------------


def _be_a_rank(
    request: Request, environment: dict[str, str], pipe: int, output: int, stack: int, server: int
) -> None:
    os.setpgid(0, 0)
    _die_with_parent(server)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True, write_through=True)
    faulthandler.enable(2)
    faulthandler.register(DUMP_SIGNAL, file=stack, all_threads=True)
    status, value, report = "done", b"", ""
    try:
        os.environ.clear()
        os.environ.update({**request.environment, "OMP_NUM_THREADS": "1", **environment})
        os.chdir(request.directory)
        sys.path[:] = request.path
        _seed_from_entropy()
        function, args, kwargs = pickle.loads(request.call)
        value = pickle.dumps(function(*args, **kwargs))
        _leave_world()
    except BaseException:
        status, value, report = "failed", b"", traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    reply = memoryview(pickle.dumps((status, value, report)))
    while reply:
        reply = reply[os.write(pipe, reply) :]


def _seed_from_entropy() -> None:
    """Undo what ranks share by being forks: separately started processes draw different numbers from numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _leave_world() -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from drivetrain.runtime.process_group import destroy_process_group

        destroy_process_group()
