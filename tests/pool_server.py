"""The other side of tests/pool.py: the warm server that forks the ranks, and what a rank does first and last.

The server must stay single-threaded, since a fork copies only the thread that calls it: it imports, and
computes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import pickle
import pkgutil
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# After one rank has failed, the others have this long to say what they saw before they are killed.
GRACE_SECONDS = 1.0
# A rank writes where it hangs from a C signal handler: at once, unless the machine is very busy.
DUMP_SECONDS = 0.5
# Set in every rank.
INSIDE = "TEST_POOL_RANK"
DEVICE = "DRIVETRAIN_TESTS_DEVICE"
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (1 if hasattr(signal, "SIGRTMAX") else 0)
# Below the range that Linux gives to outgoing connections: nothing takes a port between choice and use.
PORTS = range(15_000, 32_000)


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
    """How one rank ended.

    `status` is done, failed, hung (at the time-out) or stopped (after another rank had failed).
    """

    rank: int
    status: str = "stopped"
    value: bytes = b""
    traceback: str = ""
    output: str = ""
    ended: float = 0.0


def serve(descriptor: int, session: int) -> None:
    """Serve calls that come over a connection until the session at its other end has gone."""
    _die_with_parent(session)
    _adopt_orphans()
    connection = Connection(descriptor)
    _warm_up()
    # Out of the garbage collector's sight: else each rank walks, and so copies, all that was imported.
    gc.collect()
    gc.freeze()
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
            waiting: list[Any] = [self.connection, *(rank.pipe for rank in self.running.values())]
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
        with socket.socket() as probe, contextlib.suppress(OSError):
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


# A rank's side


def _be_a_rank(request: Request, environment: dict[str, str], pipe: int, output: int, stack: int, server: int) -> None:
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
        os.environ.update({**request.environment, "OMP_NUM_THREADS": "1", INSIDE: "1", **environment})
        os.chdir(request.directory)
        sys.path[:] = request.path
        _seed_from_entropy()
        if request.environment.get(DEVICE) == "sim":
            from tests.simulated.devices import start

            start(request.world_size)
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
    """Let unseeded ranks draw different numbers from numpy, as processes started one by one do."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _leave_world() -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from drivetrain.runtime.process_group import destroy_process_group

        destroy_process_group()
