"""Launch of several processes from a notebook, by fork or by spawning new interpreters."""

from __future__ import annotations

import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from drivetrain.launch.launcher import LaunchPlan
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.report import RankFailure, describe, first_failure
from drivetrain.runtime import xla
from drivetrain.runtime.devices import cpu_is_requested, detect_device_kind, get_device_kind
from drivetrain.runtime.errors import ConfigurationError, LaunchError, is_library, known_keywords, short_tracebacks
from drivetrain.runtime.state import PartialState, leave_run
from drivetrain.runtime.terminal import flush_output

_MOST_LINES = 12
_FRAME = re.compile(r'  File "(.+)", line \d+, in ')
_SEE_ALL = "`import sys; print(sys.last_value)` shows all"


class NotebookError(LaunchError):
    """Error raised if a process of `notebook_launcher` fails."""

    def _render_traceback_(self) -> list[str]:
        lines = str(self).splitlines()
        if len(lines) > _MOST_LINES:
            lines = _without_library_frames(lines)
        left_out = len(lines) - _MOST_LINES
        if left_out <= 0:
            return lines
        note = f"  ... {left_out + 1} lines are left out: {_SEE_ALL}"
        return [*lines[:2], note, *lines[left_out + 3 :]]


def _without_library_frames(lines: list[str]) -> list[str]:
    """Remove the library frames, such as torch's, from the lines of a traceback."""
    kept: list[str] = []
    is_hidden = False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            is_hidden = is_library(frame[1])
        elif not line.startswith("    "):
            is_hidden = False
        if not is_hidden:
            kept.append(line)
    left_out = len(lines) - len(kept)
    return [*kept[:-1], f"  ... {left_out} lines of libraries are left out: {_SEE_ALL}", kept[-1]] if left_out else kept


def cloudpickle_module() -> Any:
    for name in ("cloudpickle", "joblib.externals.cloudpickle"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_SPAWN = "start new interpreters with notebook_launcher(start_method=\"spawn\") or Trainer(strategy='ddp_spawn')."


def check_forkable(kind: str) -> None:
    """Raise a `LaunchError` if processes that use devices of the type `kind` cannot be started by a fork."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            'This system has no fork. To start new interpreters instead, use notebook_launcher(start_method="spawn") '
            "or Trainer(strategy='ddp_spawn')."
        )
    if not get_device_kind(kind).forks:
        raise LaunchError(f"{kind} devices cannot be used in forked processes: {_SPAWN}")
    if get_device_kind(kind).is_started():
        raise LaunchError(
            f"{kind} is already in use in this process, and its state does not survive a fork. Restart the kernel and "
            f"use {kind} only inside the function given to notebook_launcher or in the hooks of a task. Or {_SPAWN}"
        )
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("Processes can be forked safely from the main thread only. Call notebook_launcher there.")


# Pickling for new interpreters


_DEPTH = 4  # maximum nesting of attributes to search for the object that cannot be pickled
_PLAIN = (str, bytes, int, float, type(None))


def sent(value: Any, has_script: bool) -> bytes:
    cloud = cloudpickle_module()
    if has_script or cloud is None:
        try:
            return pickle.dumps(value)
        except Exception:
            if cloud is None:
                raise
    assert cloud is not None
    buffer = io.BytesIO()

    class Pickler(cloud.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, given: Any) -> Any:
            # The child process imports the script, and finds this class or function there.
            if has_script and isinstance(given, type | FunctionType) and _is_of_script(given):
                return NotImplemented
            return super().reducer_override(given)

    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _is_of_script(given: type | FunctionType) -> bool:
    found: Any = sys.modules["__main__"] if given.__module__ == "__main__" else None
    for name in given.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is given


def what_cannot_be_sent(parts: Mapping[str, Any], has_script: bool) -> str:
    for name, value in parts.items():
        reason = _reason(value, has_script)
        if reason:
            return _innermost(name, value, reason, has_script, _DEPTH)
    return ""


def _innermost(name: str, value: Any, reason: str, has_script: bool, depth: int) -> str:
    for inner, held in _contents(name, value) if depth else ():
        found = _reason(held, has_script)
        if found:
            return _innermost(inner, held, found, has_script, depth - 1)
    return f"{name} ({type(value).__qualname__}) cannot be pickled: {reason}"


def _contents(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{number}]", held) for number, held in enumerate(value))
    elif not isinstance(value, type | FunctionType):
        for key, held in getattr(value, "__dict__", {}).items():
            if key in ("_modules", "_parameters", "_buffers"):
                yield from ((f"{name}.{inner}", each) for inner, each in held.items())
            elif key != "_trainer":
                yield f"{name}.{key}", held


def _reason(value: Any, has_script: bool) -> str:
    if isinstance(value, _PLAIN):
        return ""
    try:
        sent(value, has_script)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


# TPUs


def launch_on_xla(
    function: Callable[..., Any],
    args: Sequence[Any],
    num_processes: int | None,
    mixed_precision: str,
    num_nodes: int,
) -> None:
    """Run a function on this machine's XLA devices, such as TPUs, in forked processes.

    torch_xla forks the processes and assigns their devices. Objects in `args`, such as a model, are shared with them
    until they change them (copy on write).
    """
    if num_nodes > 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes}: on TPUs notebook_launcher supports one host only. Start the script on each host "
            "instead.",
        )
    devices = xla.device_count()
    apart = xla.has_process_per_device()
    processes = (devices if apart else 1) if num_processes is None else num_processes
    plan = LaunchPlan.make(LaunchOptions(num_processes=1, mixed_precision=mixed_precision))
    if processes == 1:
        with plan.environment():
            function(*args)
        return
    if xla.runs_on_cpu():
        raise ConfigurationError(
            f"num_processes is {processes}, but XLA on the CPU cannot connect several processes, so each would train "
            "alone. Use num_processes=1, and set CPU_NUM_DEVICES=4 to train on four devices.",
        )
    if not apart:
        raise ConfigurationError(
            f"num_processes is {processes}, but on TPUs v2 and v3 each process would drive two cores in threads, "
            "which drivetrain does not support. Use num_processes=1, which drives all cores.",
        )
    if processes != devices:
        raise ConfigurationError(
            f"num_processes={processes}, but this host has {devices} XLA devices. Allowed: 1 (one process drives all) "
            f"or {devices} (one process per device).",
        )
    check_forkable("xla")
    variables = {**plan.variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        xla.import_torch_xla().launch(_run_xla_rank, args=(function, tuple(args), variables), start_method="fork")
    except Exception as error:
        raise LaunchError(f"One of the {devices} processes failed: {type(error).__name__}: {error}") from error


def _run_xla_rank(index: int, function: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str]) -> None:
    runtime = importlib.import_module("torch_xla.runtime")
    places = {
        "RANK": runtime.global_ordinal(),
        "WORLD_SIZE": runtime.world_size(),
        "LOCAL_RANK": runtime.local_ordinal(),
        "LOCAL_WORLD_SIZE": runtime.local_process_count(),
    }
    os.environ.update(variables)
    os.environ.update({name: str(value) for name, value in places.items()})
    function(*args)


# The script's module in new interpreters


_NAME = "__mp_main__"  # multiprocessing and pickle look up the main module by this name
_IMPORTS = "imports_script"


class ScriptReached(BaseException):
    # Ends a child's import of the script before it starts processes again.
    ...


@dataclass(frozen=True)
class ScriptMain:
    """The user's script as a path and module name, so that a new process can import its functions."""

    path: str
    module: str | None = None  # if it was started with `python -m`

    @classmethod
    def here(cls) -> ScriptMain | None:
        main = sys.modules["__main__"]
        path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        if path is None or not os.path.isfile(path):
            return None
        if spec is None:
            return cls(os.path.abspath(path))
        return None if spec.name.rpartition(".")[2] == "__main__" else cls(os.path.abspath(path), spec.name)

    def load(self) -> None:
        # Under this name, `if __name__ == "__main__"` does not run.
        module = ModuleType(_NAME)
        module.__file__ = self.path
        sys.modules["__main__"] = sys.modules[_NAME] = module
        PartialState.registry()[_IMPORTS] = True
        try:
            exec(self._code(module), module.__dict__)
        # The call that would start processes again ends the import.
        except ScriptReached:
            pass
        finally:
            PartialState.registry().pop(_IMPORTS, None)

    def _code(self, module: ModuleType) -> CodeType:
        if self.module is not None:
            module.__spec__ = importlib.util.find_spec(self.module)
            module.__package__ = self.module.rpartition(".")[0]
        with open(self.path, "rb") as file:
            return compile(file.read(), self.path, "exec")


def stop_at_start_of_processes() -> None:
    if PartialState.registry().get(_IMPORTS):
        raise ScriptReached


@contextmanager
def script_hidden() -> Iterator[None]:
    main = sys.modules["__main__"]
    # multiprocessing finds the script by `__file__` and `__spec__` of `__main__`, which this module lacks.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# Processes that run one function


_STOP_PATIENCE = 2.0  # seconds between SIGTERM and SIGKILL for the other processes after a failure
_INTERRUPT_PATIENCE = 30.0  # seconds to exit cleanly after an interrupt
_SETTLE = 0.2  # seconds in which an earlier failure of another process may still be reported
Prepare = tuple[Callable[..., Any], tuple[Any, ...]]
_PREEMPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class InterruptedProcessesError(KeyboardInterrupt):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Call:
    def __init__(self, function: Callable[..., Any], args: Sequence[Any], prepare: Prepare | None = None) -> None:
        self._function, self._args, self._prepare = function, args, prepare

    def prepare(self) -> None:
        if self._prepare is not None:
            function, args = self._prepare
            function(*args)

    def __call__(self) -> Any:
        return self._function(*self._args)


class PickledCall(Call):
    """Function and arguments in pickled form, for a process that `start_method="spawn"` starts."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], prepare: Prepare | None = None) -> None:
        self._script, self._prepare = ScriptMain.here(), prepare
        if self._script is None and function.__module__ == "__main__" and cloudpickle_module() is None:
            raise LaunchError(
                f"start_method='spawn' needs cloudpickle for {function.__qualname__!r}, which no file defines. Run "
                "`pip install cloudpickle`, or write it to a file (`%%writefile training.py`) and import it."
            )
        try:
            self._pickled = sent((function, tuple(args)), self._script is not None)
        except Exception as error:
            raise LaunchError(
                f"{function.__qualname__!r} and its arguments cannot be pickled for start_method='spawn' ({error}). "
                "Pass arguments that can be pickled, or use start_method='fork'."
            ) from error

    def prepare(self) -> None:
        if self._script is not None:
            self._script.load()
        super().prepare()

    def __call__(self) -> Any:
        function, args = pickle.loads(self._pickled)
        return function(*args)


class Processes:
    def __init__(
        self,
        method: str,
        call: Call,
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
        self._received: dict[int, tuple[str, Any, float]] = {}  # rank -> kind, text or value, and time
        self._last_seen = time.time()
        flush_output()
        with script_hidden() if method == "spawn" else nullcontext():
            for local_rank in range(int(variables["LOCAL_WORLD_SIZE"])):
                self._start(context, call, variables, local_rank)

    def _start(self, context: Any, call: Call, variables: dict[str, str], local_rank: int) -> None:
        rank = self._first_rank + local_rank
        receiver, sender = context.Pipe(duplex=False)
        own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        given = (call, own, sender, self._forwards)
        process = context.Process(target=_run_rank, args=given, name=f"rank{rank}", daemon=False)
        # Fork from a new thread: GNU OpenMP keeps a pool per thread, and a child forked from a thread that has used
        # its pool waits for ever for workers that do not exist in the child (seen with torch 2.13).
        starter = threading.Thread(target=process.start)
        starter.start()
        starter.join()
        if process.pid is None:
            self._end()
            raise LaunchError(f"Process {rank} could not be started. Check the limits on processes and memory.")
        sender.close()
        self._processes[rank], self._reports[rank] = process, receiver

    def run(self) -> Any:
        try:
            with self._signals_forwarded():
                self._wait()
            time.sleep(_SETTLE if any(process.exitcode for process in self._processes.values()) else 0)
            failures = self._failures()
        except KeyboardInterrupt:
            # The terminal or the notebook has sent the signal to all processes of this process group already.
            if self._forwards:
                self._send(signal.SIGINT)
            self._wait(_INTERRUPT_PATIENCE)
            if self._forwards and self._value() is not None:
                # All processes have ended after the interrupt, and the first one has returned a value.
                raise InterruptedProcessesError(self._returned()) from None
            raise
        finally:
            self._end()
        if failures:
            raise NotebookError(describe(first_failure(failures), self._world_size))
        self._read_reports()
        return self._returned()

    def _wait(self, patience: float = float("inf")) -> None:
        deadline = time.monotonic() + patience
        while alive := [process for process in self._processes.values() if process.exitcode is None]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            unread = [report for rank, report in self._reports.items() if rank not in self._received]
            ended = wait([*(process.sentinel for process in alive), *unread], timeout=min(1.0, left))
            self._read_reports()  # a process with a large value blocks until its report is read
            if patience == float("inf") and any(process.exitcode for process in self._processes.values()):
                return
            if not ended:  # an ended process may not have an exit code yet, but it no longer counts as alive
                self._last_seen = time.time()
        self._read_reports()

    def _value(self) -> bytes | None:
        kind, value, _ = self._received.get(self._first_rank, ("nothing", "", 0.0))
        return value if kind == "value" else None

    def _returned(self) -> Any:
        value = self._value()
        if value is not None:
            return pickle.loads(value)
        kind, text, _ = self._received.get(self._first_rank, ("nothing", "", 0.0))
        if kind == "unpicklable":
            warnings.warn(f"The function's return value is lost, because {text}.", stacklevel=4)
        return None

    @contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
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
        for rank, report in self._reports.items():
            try:
                if rank not in self._received and report.poll():
                    self._received[rank] = report.recv()
            except EOFError:
                self._received[rank] = ("nothing", "", self._last_seen)  # it exited without a report

    def _failures(self) -> list[RankFailure]:
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


def _run_rank(call: Call, variables: dict[str, str], report: Connection, leaves_group: bool) -> None:
    # A forked process inherits the handlers of its parent, which forward signals to the ranks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if leaves_group:
        # Ctrl-C then reaches only the parent, which sends it on once.
        os.setpgrp()
    threading.Thread(target=_end_with_parent, name="drivetrain-parent", daemon=True).start()
    try:
        call.prepare()  # before the rank is set, so that the script's top level cannot join the run
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
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # Not `sys.exit`, which would only end this thread.
        os._exit(1)


_START_METHODS = ("fork", "spawn")


@known_keywords
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
    start_method: str | None = None,
    cpu: bool = False,
) -> Any:
    """Run a function in several processes, for example to train on all GPUs from a notebook.

    Args:
        function: Function to run in each process. It must create its own Trainer or Accelerator.
        args: Arguments of the function.
        num_processes: Number of processes over all machines. None means one per accelerator, or one on the CPU. A
            single process runs in this one, without a new process.
        mixed_precision: Default precision in the processes.
        use_port: Port of the rendezvous. 0 uses a free port, on one machine only.
        master_addr: Address of machine 0.
        node_rank: Index of this machine, from 0.
        num_nodes: Number of machines. The same call must run on each.
        rdzv_backend: Ignored. Machines connect to `master_addr`, ordered by `node_rank`.
        rdzv_endpoint: Address and port in one string, such as `"10.0.0.1:29500"`.
        rdzv_conf: Ignored.
        rdzv_id: Ignored.
        max_restarts: Maximum number of restarts of all processes after a failure, on one machine only.
        monitor_interval: Ignored. The end of a process is detected at once.
        log_line_prefix_template: Ignored.
        start_method: `"fork"`, or `"spawn"` for new interpreters, which also works if a device is already in use in
            this process. Spawned processes get the function and its arguments by pickle, and no other variables. None
            means `"spawn"` on devices that forked processes cannot use, such as Intel's and AMD's GPUs, else `"fork"`.
        cpu: Run on the CPU even if there are accelerators, as `DRIVETRAIN_USE_CPU=1` does too.

    Returns:
        The return value of the function in the first process of this machine, or None with a warning if it cannot be
        pickled.

    Raises:
        LaunchError: A process failed, with the first traceback in the message. Or the processes cannot be started
            because an accelerator or an Accelerator is already in use in this process. A notebook shows at most 12
            lines.
        ConfigurationError: An argument is invalid.

    Example:
        ```python
        from drivetrain.launch import notebook_launcher

        def train(epochs: int) -> None:
            print(f"training for {epochs} epochs")

        notebook_launcher(train, args=(3,), num_processes=1)
        ```
    """
    _check_start(start_method, max_restarts, num_nodes)
    cpu = cpu or cpu_is_requested()
    if not cpu and detect_device_kind().drives_all:
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
        cpu=cpu,
        mixed_precision=mixed_precision,
        max_restarts=max_restarts,
    )
    return call_in_processes(function, args, options, start_method)


def call_in_processes(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: LaunchOptions,
    start_method: str | None,
    *,
    prepare: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
    takes_over: bool = False,
) -> Any:
    """Call a function in several new processes, and return the result of the first process.

    The processes exit if this process exits.

    Args:
        function: The function to run in each process.
        args: The arguments of the function.
        options: The options of the launch, such as the number of processes.
        start_method: `"fork"` or `"spawn"`. None means fork if the device allows it.
        prepare: A function to call in each process before it gets its rank, and its arguments.
        takes_over: True to allow process state in this process, and to forward its signals to the processes.
    """
    stop_at_start_of_processes()
    plan = LaunchPlan.make(options)
    world_size = plan.local_processes * options.max_machines
    if world_size == 1:
        with plan.environment():
            return function(*args)
    start_method = start_method or ("fork" if get_device_kind(plan.kind).forks else "spawn")
    if start_method == "fork":
        if not takes_over and PartialState.existing() is not None:
            raise LaunchError(
                "This process already has an Accelerator, Trainer or PartialState, so new processes cannot create one. "
                "Restart the kernel, and create it only inside the function passed to notebook_launcher."
            )
        check_forkable(plan.kind)
    call = (Call if start_method == "fork" else PickledCall)(function, args, prepare)
    variables = {
        **plan.variables,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(plan.local_processes),
        "MASTER_ADDR": options.main_process_ip or "127.0.0.1",
    }
    for attempt in range(options.max_restarts + 1):
        variables["MASTER_PORT"] = str(options.main_process_port or free_port())
        # Under torchrun, its agent serves the store of its own processes, not of these.
        variables |= {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        first_rank = options.machine_rank * plan.local_processes
        try:
            return Processes(start_method, call, variables, first_rank, takes_over).run()
        except NotebookError as error:
            if attempt == options.max_restarts:
                raise
            again = f"Starting all processes again (restart {attempt + 1} of {options.max_restarts})."
            print(f"{error}\n{again}", file=sys.stderr)
    raise AssertionError("unreachable")


def _check_start(method: str | None, restarts: int, machines: int) -> None:
    if method is not None and method not in _START_METHODS:
        raise ConfigurationError(f"start_method is {method!r}, but must be one of {', '.join(_START_METHODS)}.")
    if restarts and machines > 1:
        raise ConfigurationError(
            f"max_restarts is {restarts} for {machines} machines, which would restart separately. Remove "
            "max_restarts, or save the training as a file and run `drivetrain launch --max_restarts` on it.",
        )


def _port(given: str | int, machines: int) -> int | None:
    try:
        port = int(given)
    except ValueError:
        raise ConfigurationError(f"use_port is {given!r}, but must be a number. 0 uses a free port.") from None
    if port == 0 and machines > 1:
        raise ConfigurationError("use_port is 0, but several machines need a common port. Set the same port on each.")
    return port
