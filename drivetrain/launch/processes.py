"""The processes that run one function: started, waited for, and ended together."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from drivetrain.launch.forking import NotebookError, cloudpickle_module
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.report import RankFailure, describe, first_failure
from drivetrain.launch.script_main import ScriptMain, script_hidden
from drivetrain.launch.sending import sent
from drivetrain.runtime.errors import LaunchError
from drivetrain.runtime.state import leave_run
from drivetrain.runtime.terminal import flush_output
from drivetrain.runtime.tracebacks import short_tracebacks

_STOP_PATIENCE = 2.0  # seconds between SIGTERM and SIGKILL for the peers of a failed process
_INTERRUPT_PATIENCE = 30.0  # seconds to end cleanly after an interrupt; another interrupt cuts it short
_SETTLE = 0.2  # seconds in which a peer's failure may still arrive with an earlier time
_PREEMPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


def variables_of_processes(plan: LaunchPlan, world_size: int, address: str = "127.0.0.1") -> dict[str, str]:
    """The environment variables that all processes of this machine have, but for the port that they meet at.

    Args:
        plan: What runs here.
        world_size: Processes over all machines.
        address: Where they meet.
    """
    here = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(plan.local_processes), "MASTER_ADDR": address}
    return {**plan.variables, **here}


class InterruptedProcessesError(KeyboardInterrupt):
    """This process was interrupted, and the processes have ended as they do then.

    Attributes:
        value: What the function returned in the first of them.
    """

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Call:
    """What each process calls."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._function, self._args = function, args

    def prepare(self) -> None:
        """Get ready, before the process has its place among the others."""

    def __call__(self) -> Any:
        return self._function(*self._args)


class PickledCall:
    """The same by value, for a new interpreter, which imports the running script again.

    Args:
        function: What each process runs.
        args: Its arguments.

    Raises:
        LaunchError: They cannot be pickled.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._script = ScriptMain.here()
        if self._script is None and function.__module__ == "__main__" and cloudpickle_module() is None:
            raise LaunchError(
                f"start_method='spawn' needs cloudpickle for {function.__qualname__!r}, which no file defines. Run "
                "`pip install cloudpickle`, or write it to a file (`%%writefile training.py`) and import it here."
            )
        try:
            self._pickled = sent((function, tuple(args)), self._script is not None)
        except Exception as error:
            raise LaunchError(
                f"{function.__qualname__!r} and its arguments cannot be pickled for start_method='spawn' ({error}). "
                "Give what it needs as arguments that can be, or use start_method='fork'."
            ) from error

    def prepare(self) -> None:
        """Import the script, for what it defines."""
        if self._script is not None:
            self._script.load()

    def __call__(self) -> Any:
        function, args = pickle.loads(self._pickled)
        return function(*args)


class Processes:
    """The processes of one attempt.

    Args:
        method: `"fork"` or `"spawn"`.
        call: What each runs.
        variables: The environment variables that all of them have.
        first_rank: The rank of the first one here.
        forwards_signals: Whether they get signals from this process, each once, rather than from the terminal.
    """

    def __init__(
        self,
        method: str,
        call: Call | PickledCall,
        variables: dict[str, str],
        first_rank: int = 0,
        forwards_signals: bool = False,
    ) -> None:
        self._world_size = int(variables["WORLD_SIZE"])
        self._first_rank = first_rank
        self._forwards = forwards_signals and hasattr(os, "setpgrp")
        context: Any = multiprocessing.get_context(method)
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._reports: dict[int, Connection] = {}
        self._received: dict[int, tuple[str, Any, float]] = {}  # by rank: what it was, the text or value, and when
        self._last_seen = time.time()
        flush_output()
        with script_hidden() if method == "spawn" else nullcontext():
            for local_rank in range(int(variables["LOCAL_WORLD_SIZE"])):
                self._start(context, call, variables, local_rank)

    def _start(self, context: Any, call: Call | PickledCall, variables: dict[str, str], local_rank: int) -> None:
        rank = self._first_rank + local_rank
        receiver, sender = context.Pipe(duplex=False)
        own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        given = (call, own, sender, self._forwards)
        process = context.Process(target=_run_rank, args=given, name=f"rank{rank}", daemon=False)
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
        """Wait for all and return the first one's value; on a failure or an interrupt, end the others first.

        Raises:
            NotebookError: One of them failed.
            InterruptedProcessesError: This process was interrupted, and the first one has returned a value.
            KeyboardInterrupt: The same where it has not.
        """
        try:
            with self._signals_forwarded():
                self._wait()
            time.sleep(_SETTLE if any(process.exitcode for process in self._processes.values()) else 0)
            failures = self._failures()
        except KeyboardInterrupt:
            # The terminal (or the notebook) interrupts the whole group: each process in it has seen it already.
            if self._forwards:
                self._send(signal.SIGINT)
            self._wait(_INTERRUPT_PATIENCE)
            if self._forwards and self._value() is not None:
                raise InterruptedProcessesError(self._returned()) from None
            raise
        finally:
            self._end()
        if failures:
            raise NotebookError(describe(first_failure(failures), self._world_size))
        self._read_reports()
        return self._returned()

    def _wait(self, patience: float = float("inf")) -> None:
        """Wait until all have ended or one has failed; within an interrupt, for so many seconds."""
        deadline = time.monotonic() + patience
        while alive := [process for process in self._processes.values() if process.exitcode is None]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            unread = [report for rank, report in self._reports.items() if rank not in self._received]
            ended = wait([*(process.sentinel for process in alive), *unread], timeout=min(1.0, left))
            self._read_reports()  # a large value waits in its process until it is read
            if patience == float("inf") and any(process.exitcode for process in self._processes.values()):
                return
            if not ended:  # one that has ended may not have an exit code yet, but was not seen alive
                self._last_seen = time.time()
        self._read_reports()

    def _value(self) -> bytes | None:
        """The pickle of what the function returned in the first process; None without one."""
        kind, value, _ = self._received.get(self._first_rank, ("nothing", "", 0.0))
        return value if kind == "value" else None

    def _returned(self) -> Any:
        value = self._value()
        if value is not None:
            return pickle.loads(value)
        kind, text, _ = self._received.get(self._first_rank, ("nothing", "", 0.0))
        if kind == "unpicklable":
            warnings.warn(f"What the function returned is not returned here: {text}.", stacklevel=4)
        return None

    @contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        """Let a scheduler's signals reach the processes, which save and end; in the main thread only."""
        before: dict[int, Any] = {}
        if self._forwards and threading.current_thread() is threading.main_thread():
            for number in _PREEMPTING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    before[number] = signal.signal(number, lambda number, _: self._send(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _send(self, number: int) -> None:
        for process in self._processes.values():
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, number)

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
        deadline = time.monotonic() + _STOP_PATIENCE
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in alive:
            if process.exitcode is None:
                process.kill()
                process.join()
        for report in self._reports.values():
            report.close()


def _run_rank(call: Call | PickledCall, variables: dict[str, str], report: Connection, leaves_group: bool) -> None:
    """What each process does; its failure goes to the parent instead of the screen, and so does what it returns."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if leaves_group:
        os.setpgrp()
    threading.Thread(target=_end_with_parent, name="drivetrain-parent", daemon=True).start()
    try:
        call.prepare()
        os.environ.update(variables)
        if "OMP_NUM_THREADS" in variables:
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
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
    leave_run()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, which could not end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
