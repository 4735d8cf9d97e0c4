"""Several processes from a notebook: they are forked, so a function needs no file and sees all variables."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from drivetrain.launch.forking import free_port, refuse_what_a_fork_would_break
from drivetrain.launch.notebook_xla import launch_on_xla, runs_on_xla
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.report import RankFailure, describe, first_failure
from drivetrain.runtime.errors import ConfigurationError, LaunchError

_STOP_PATIENCE = 2.0  # seconds between SIGTERM and SIGKILL for the peers of a failed process
_INTERRUPT_PATIENCE = 30.0  # seconds to end cleanly after an interrupt; another interrupt cuts it short
_SETTLE = 0.2  # seconds in which a peer's failure may still arrive with an earlier time


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "0",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
) -> None:
    """Run a function in several processes and wait for them.

    Args:
        function: What each process runs. It makes its own Trainer or Accelerator.
        args: Its arguments.
        num_processes: Processes over all machines; one per accelerator, or one on the CPU, if None. With one
            process altogether, the function runs in this one.
        mixed_precision: Default number format in the processes.
        use_port: Port where they meet; 0 for a free one (on one machine).
        master_addr: Address of machine 0.
        node_rank: Which machine this is, from 0.
        num_nodes: Machines that take part; the same call runs on each.

    Raises:
        LaunchError: A process failed; the message holds the first one's traceback. Or the processes cannot be
            started: an accelerator or an Accelerator is in use here already.
        ConfigurationError: An argument that cannot be.

    Example:
        ```python
        from drivetrain.launch import notebook_launcher

        def train(epochs: int) -> None:
            print(f"training for {epochs} epochs")

        notebook_launcher(train, args=(3,), num_processes=1)
        ```
    """
    if runs_on_xla():
        launch_on_xla(function, args, num_processes, mixed_precision, num_nodes)
        return
    options = LaunchOptions(
        num_processes=num_processes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=master_addr,
        main_process_port=_port(use_port, num_nodes),
        mixed_precision=mixed_precision,
    )
    plan = LaunchPlan.make(options)
    world_size = plan.local_processes * num_nodes
    if world_size == 1:
        with plan.environment():
            function(*args)
        return
    refuse_what_a_fork_would_break(plan.kind)
    variables = {
        **plan.variables,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(plan.local_processes),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(options.main_process_port or free_port()),
    }
    _Forked(function, args, variables, first_rank=node_rank * plan.local_processes).run()


class _Forked:
    """The processes of one call."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], variables: dict[str, str], first_rank: int
    ) -> None:
        self._world_size = int(variables["WORLD_SIZE"])
        context = multiprocessing.get_context("fork")
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._reports: dict[int, Connection] = {}
        self._last_seen = time.time()
        sys.stdout.flush()
        sys.stderr.flush()
        for local_rank in range(int(variables["LOCAL_WORLD_SIZE"])):
            rank = first_rank + local_rank
            receiver, sender = context.Pipe(duplex=False)
            own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            process = context.Process(
                target=_run_rank, args=(function, args, own, sender), name=f"rank{rank}", daemon=False
            )
            # Forked from a thread that has never computed: GNU OpenMP keeps its pool by thread, and a child of the
            # thread that used it would wait for ever for workers that the fork left behind (seen with torch 2.13).
            starter = threading.Thread(target=process.start)
            starter.start()
            starter.join()
            if process.pid is None:
                self._end()
                raise LaunchError(f"Process {rank} could not be forked; is the limit on processes or memory reached?")
            sender.close()
            self._processes[rank], self._reports[rank] = process, receiver

    def run(self) -> None:
        """Wait for all; on a failure or an interrupt, end the others first."""
        try:
            while alive := [process for process in self._processes.values() if process.exitcode is None]:
                ended = wait([process.sentinel for process in alive], timeout=1.0)
                if any(process.exitcode not in (None, 0) for process in self._processes.values()):
                    break
                if not ended:  # one that has ended may not have an exit code yet, but was not seen alive
                    self._last_seen = time.time()
            time.sleep(_SETTLE if any(process.exitcode for process in self._processes.values()) else 0)
            failures = self._failures()
        except KeyboardInterrupt:
            # The terminal (or the notebook) interrupted the whole group: each process has seen it already.
            self._join(_INTERRUPT_PATIENCE)
            raise
        finally:
            self._end()
        if failures:
            raise LaunchError(describe(first_failure(failures), self._world_size))

    def _failures(self) -> list[RankFailure]:
        """Those that have failed by now, before any is stopped by us."""
        failures = []
        for local_rank, (rank, process) in enumerate(self._processes.items()):
            code = process.exitcode
            if not code:
                continue
            text, timestamp = "", self._last_seen
            report = self._reports[rank]
            try:
                if report.poll():
                    text, timestamp = report.recv()
            except EOFError:
                pass  # it ended without a word
            failures.append(RankFailure(rank, local_rank, process.pid or 0, code, timestamp, text))
        return failures

    def _end(self) -> None:
        alive = [process for process in self._processes.values() if process.exitcode is None]
        for process in alive:
            process.terminate()
        self._join(_STOP_PATIENCE)
        for process in alive:
            if process.exitcode is None:
                process.kill()
                process.join()
        for report in self._reports.values():
            report.close()

    def _join(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))


def _run_rank(function: Callable[..., Any], args: Sequence[Any], variables: dict[str, str], report: Connection) -> None:
    """What each forked process does; its failure goes to the parent instead of the screen."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(variables)
    if "OMP_NUM_THREADS" in variables:
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    try:
        function(*args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            raise
        report.send((str(stop.code), time.time()))
        sys.exit(1)
    except BaseException as error:
        now, trace = time.time(), error.__traceback__
        lines = traceback.format_exception(type(error), error, trace.tb_next if trace is not None else None)
        report.send(("".join(lines), now))
        sys.exit(1)


def _port(given: str | int, machines: int) -> int | None:
    try:
        port = int(given)
    except ValueError:
        raise ConfigurationError(f"use_port is {given!r}, but must be a number; 0 takes a free port.") from None
    if port == 0 and machines > 1:
        raise ConfigurationError("use_port is 0, but several machines must agree on one. Give the same port on each.")
    return port
