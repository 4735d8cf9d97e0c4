"""Several processes from a notebook: forked, so that a function needs no file and sees all variables, or spawned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from drivetrain.launch.forking import NotebookError, cloudpickle_dumps, free_port, refuse_what_a_fork_would_break
from drivetrain.launch.notebook_xla import launch_on_xla, runs_on_xla
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.report import RankFailure, describe, first_failure
from drivetrain.runtime.errors import ConfigurationError, LaunchError
from drivetrain.runtime.tracebacks import short_tracebacks

_START_METHODS = ("fork", "spawn")
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
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    start_method: str = "fork",
) -> Any:
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
        rdzv_backend: Accepted for Accelerate's sake: machines meet at `master_addr`, and `node_rank` orders them.
        rdzv_endpoint: That address and port in one, as in `"10.0.0.1:29500"`.
        rdzv_conf: Accepted for Accelerate's sake.
        rdzv_id: Accepted for Accelerate's sake.
        max_restarts: How often all processes are started again after a failure; on one machine.
        monitor_interval: Accepted for Accelerate's sake: a process's end is seen at once.
        log_line_prefix_template: Accepted for Accelerate's sake.
        start_method: `"fork"`, or `"spawn"` for new interpreters, also where a device is in use here
            already. What is spawned gets the function and its arguments by pickle, and sees no other variable.

    Returns:
        What the function returned in the first process of this machine, if it can be pickled.

    Raises:
        LaunchError: A process failed; the message holds the first one's traceback. Or the processes cannot be
            started: an accelerator or an Accelerator is in use here already. A notebook shows it in 12 lines at most.
        ConfigurationError: An argument that cannot be.

    Example:
        ```python
        from drivetrain.launch import notebook_launcher

        def train(epochs: int) -> None:
            print(f"training for {epochs} epochs")

        notebook_launcher(train, args=(3,), num_processes=1)
        ```
    """
    _check_start(start_method, max_restarts, num_nodes)
    if runs_on_xla():
        launch_on_xla(function, args, num_processes, mixed_precision, num_nodes)
        return None
    if rdzv_endpoint:
        master_addr, _, port = rdzv_endpoint.partition(":")
        use_port = port or use_port
    options = LaunchOptions(
        num_processes=num_processes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=master_addr,
        main_process_port=_port(use_port, num_nodes),
        mixed_precision=mixed_precision,
        max_restarts=max_restarts,
    )
    plan = LaunchPlan.make(options)
    world_size = plan.local_processes * num_nodes
    if world_size == 1:
        with plan.environment():
            return function(*args)
    if start_method == "fork":
        refuse_what_a_fork_would_break(plan.kind)
    variables = {
        **plan.variables,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(plan.local_processes),
        "MASTER_ADDR": master_addr,
    }
    call = _Call(function, args) if start_method == "fork" else _PickledCall(function, args)
    for attempt in range(max_restarts + 1):
        variables["MASTER_PORT"] = str(options.main_process_port or free_port())
        variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        try:
            return _Processes(start_method, call, variables, first_rank=node_rank * plan.local_processes).run()
        except NotebookError as error:
            if attempt == max_restarts:
                raise
            print(f"{error}\nStarting all processes again (restart {attempt + 1} of {max_restarts}).", file=sys.stderr)
    return None


class _Call:
    """What each process calls."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._function, self._args = function, args

    def __call__(self) -> Any:
        return self._function(*self._args)


class _PickledCall:
    """The same by value, for a new interpreter."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        dump = cloudpickle_dumps()
        if dump is None and function.__module__ == "__main__":
            raise LaunchError(
                f"start_method='spawn' needs cloudpickle for {function.__qualname__!r}, which no file defines. Run "
                "`pip install cloudpickle`, or write it to a file (`%%writefile training.py`) and import it here."
            )
        try:
            self._pickled = (dump or pickle.dumps)((function, tuple(args)))
        except Exception as error:
            raise LaunchError(
                f"{function.__qualname__!r} and its arguments cannot be pickled for start_method='spawn' ({error}). "
                "Give what it needs as arguments that can be, or use start_method='fork'."
            ) from error

    def __call__(self) -> Any:
        function, args = pickle.loads(self._pickled)
        return function(*args)


class _Processes:
    """The processes of one attempt."""

    def __init__(self, method: str, call: Callable[[], Any], variables: dict[str, str], first_rank: int) -> None:
        self._world_size = int(variables["WORLD_SIZE"])
        self._first_rank = first_rank
        context: Any = multiprocessing.get_context(method)
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._reports: dict[int, Connection] = {}
        self._received: dict[int, tuple[str, Any, float]] = {}  # by rank: what it was, the text or value, and when
        self._last_seen = time.time()
        sys.stdout.flush()
        sys.stderr.flush()
        for local_rank in range(int(variables["LOCAL_WORLD_SIZE"])):
            rank = first_rank + local_rank
            receiver, sender = context.Pipe(duplex=False)
            own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            process = context.Process(target=_run_rank, args=(call, own, sender), name=f"rank{rank}", daemon=False)
            # Forked from a thread that has never computed: GNU OpenMP keeps its pool by thread, and a child of the
            # thread that used it would wait for ever for workers that the fork left behind (seen with torch 2.13).
            starter = threading.Thread(target=process.start)
            starter.start()
            starter.join()
            if process.pid is None:
                self._end()
                raise LaunchError(f"Process {rank} could not be started; is the limit on processes or memory reached?")
            sender.close()
            self._processes[rank], self._reports[rank] = process, receiver

    def run(self) -> Any:
        """Wait for all and return the first one's value; on a failure or an interrupt, end the others first."""
        try:
            while alive := [process for process in self._processes.values() if process.exitcode is None]:
                unread = [report for rank, report in self._reports.items() if rank not in self._received]
                ended = wait([*(process.sentinel for process in alive), *unread], timeout=1.0)
                self._read_reports()  # a large value waits in its process until it is read
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
            raise NotebookError(describe(first_failure(failures), self._world_size))
        self._read_reports()
        kind, value, _ = self._received.get(self._first_rank, ("value", pickle.dumps(None), 0.0))
        if kind == "value":
            return pickle.loads(value)
        warnings.warn(f"What the function returned is not returned here: {value}.", stacklevel=3)
        return None

    def _read_reports(self) -> None:
        """Read what processes have left so far."""
        for rank, report in self._reports.items():
            try:
                if rank not in self._received and report.poll():
                    self._received[rank] = report.recv()
            except EOFError:
                self._received[rank] = ("nothing", "", self._last_seen)  # it ended without a word

    def _failures(self) -> list[RankFailure]:
        """Those that have failed by now, before any is stopped by us."""
        failures = []
        self._read_reports()
        for local_rank, (rank, process) in enumerate(self._processes.items()):
            code = process.exitcode
            if not code:
                continue
            kind, text, timestamp = self._received.get(rank, ("nothing", "", self._last_seen))
            text = text if kind == "error" else ""
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


def _run_rank(call: Callable[[], Any], variables: dict[str, str], report: Connection) -> None:
    """What each process does; its failure goes to the parent instead of the screen, and so does what it returns."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(variables)
    if "OMP_NUM_THREADS" in variables:
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    try:
        value = call()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            raise
        report.send(("error", str(stop.code), time.time()))
        sys.exit(1)
    except BaseException as error:
        now, trace = time.time(), error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        with short_tracebacks(error, trace):
            shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        report.send(("error", shown, now))
        sys.exit(1)
    if variables["LOCAL_RANK"] == "0":
        try:
            report.send(("value", pickle.dumps(value), time.time()))
        except Exception as error:
            report.send(("unpicklable", f"{type(value).__name__} cannot be pickled ({error})", time.time()))


def _check_start(method: str, restarts: int, machines: int) -> None:
    if method not in _START_METHODS:
        raise ConfigurationError(
            f"start_method is {method!r}, but must be one of {', '.join(_START_METHODS)}.", code="DT-001"
        )
    if restarts and machines > 1:
        raise ConfigurationError(
            f"max_restarts is {restarts} for {machines} machines, which would start again one by one. Leave it "
            "out, or save the training as a file and run `drivetrain launch --max_restarts` on it.",
            code="DT-033",
        )


def _port(given: str | int, machines: int) -> int | None:
    try:
        port = int(given)
    except ValueError:
        raise ConfigurationError(
            f"use_port is {given!r}, but must be a number; 0 takes a free port.", code="DT-003"
        ) from None
    if port == 0 and machines > 1:
        raise ConfigurationError(
            "use_port is 0, but several machines must agree on one. Give the same port on each.", code="DT-033"
        )
    return port
