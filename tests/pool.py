"""A warm pool for tests that need several real processes.

Starting an interpreter and importing torch costs seconds, forking a process that has done so costs
milliseconds. So one server process per test session imports torch and drivetrain, computes nothing (a process
that has started OpenMP or autograd threads must not fork), and forks fresh processes for every call:

    from tests.pool import run_in_processes

    def sum_of_ranks() -> int:
        state = PartialState()
        return int(reduce(torch.tensor(state.process_index), reduction="sum"))

    def test_every_rank_sees_the_sum() -> None:
        assert run_in_processes(sum_of_ranks, world_size=3) == [3, 3, 3]

A rank that raises or dies fails the test with its traceback and output, and the others are stopped. Past the
time-out every rank is killed, and the failure says which were still running and where. Nothing outlives a
call, nor the session, not even one that was killed.

What real launches have and this has not: all ranks share one hash seed, since they are forks of one process.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.pool_server import DEVICE, INSIDE, ROOT, Outcome, Request


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


def device() -> str:
    """The kind of device that the tests of this session train on: `"cpu"`, or what `--device` names."""
    return os.environ.get(DEVICE, "cpu")


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
    if INSIDE in os.environ:
        raise RuntimeError("run_in_processes was called inside a rank: is there code at the top of the test module?")
    try:
        call = pickle.dumps((function, tuple(args), dict(kwargs or {})))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_in_processes got {function!r}, which cannot be sent to another process ({error}). "
            "Give a function defined at the top of a module and arguments that pickle."
        ) from None
    environment = dict(os.environ)
    if DEVICE not in environment and DEVICE not in (env or {}):
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


# The test session's side

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
            [
                sys.executable,
                "-c",
                f"from tests.pool_server import serve; serve({theirs.fileno()}, {os.getpid()})",
            ],
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
