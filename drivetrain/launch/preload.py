"""Processes that are forked from one that has imported torch already, in place of importing it once in each.

The launcher starts that process before it imports torch for itself, so both import at the same time. It imports and
does nothing else: it touches no device and starts no thread, so that what is forked is like a fresh interpreter. Where
that cannot be had, there is a reason, and each rank starts as an interpreter of its own.

Imports no torch. See `preloaded.py` for the other side.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from drivetrain.launch.interpreter import Invocation
from drivetrain.launch.options import THREADS_VARIABLE, LaunchOptions, threads_per_process
from drivetrain.runtime.errors import LaunchError

# Which imports of a script can be done once, before its processes are forked, and which scripts need them all


# Packages that take long to import, start no thread, touch no device, and read nothing of a rank while they are.
PRELOADABLE = frozenset(
    [
        "datasets",
        "diffusers",
        "drivetrain",
        "einops",
        "huggingface_hub",
        "matplotlib",
        "numpy",
        "pandas",
        "peft",
        "PIL",
        "safetensors",
        "scipy",
        "sklearn",
        "timm",
        "tokenizers",
        "torch",
        "torchaudio",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "transformers",
        "trl",
    ]
)

# Variables that are read while such a package, or the interpreter, loads.
READ_ON_IMPORT = ("GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_")
# These begin alike, but the elastic agent sets them for each rank, and they are read when a process group is made.
_READ_LATER = ("TORCH_NCCL_",)


@dataclass(frozen=True)
class ImportedNames:
    """One import: a module, and the names that are taken from it."""

    module: str
    names: tuple[str, ...] = ()


def is_read_on_import(variable: str) -> bool:
    """Whether a change of an environment variable has no effect once the packages are loaded."""
    return variable.startswith(READ_ON_IMPORT) and not variable.startswith(_READ_LATER)


def why_not_preload(script: str) -> str | None:
    """The reason why a script must import everything by itself; None where there is none.

    Args:
        script: Path of a Python file.
    """
    tree = _parse(script)
    if tree is None:
        return f"{script} cannot be read as Python"
    imports = list(_all_imports(tree))
    if all(_package(each) in sys.stdlib_module_names for each in imports):
        return "the script imports nothing but the standard library"
    directory = os.path.dirname(os.path.realpath(script))
    local = {path for each in imports if (path := _local_file(directory, each.module)) is not None}
    for file in [script, *sorted(local)]:
        for name in _variables_set(_parse(file)):
            if is_read_on_import(name):
                return f"{os.path.relpath(file)} sets {name}, which is read while torch is imported"
    return None


def leading_imports(script: str) -> list[ImportedNames]:
    """The imports at the top of a script that can be done before it runs, in its order.

    They end at the first statement that is no import, and at the first import of a package that is not known to be
    safe: what follows may depend on it, such as on a variable that it sets.

    Args:
        script: Path of a Python file.
    """
    tree = _parse(script)
    found: list[ImportedNames] = []
    for statement in tree.body if tree is not None else []:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        imports = list(_imports(statement))
        if not imports:
            break
        for each in imports:
            if _package(each) in PRELOADABLE:
                found.append(each)
            elif _package(each) not in sys.stdlib_module_names:
                return found
    return found


def _all_imports(tree: ast.Module) -> Iterator[ImportedNames]:
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            yield from _imports(node)


def _imports(statement: ast.stmt) -> Iterator[ImportedNames]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield ImportedNames(alias.name)
    elif isinstance(statement, ast.ImportFrom) and statement.module is not None and statement.level == 0:
        yield ImportedNames(statement.module, tuple(alias.name for alias in statement.names if alias.name != "*"))


def _local_file(directory: str, module: str) -> str | None:
    """The file beside the script that a module is, if it is one."""
    place = os.path.join(directory, *module.split("."))
    return next((path for path in (f"{place}.py", os.path.join(place, "__init__.py")) if os.path.isfile(path)), None)


def _package(imported: ImportedNames) -> str:
    return imported.module.partition(".")[0]


def _variables_set(tree: ast.Module | None) -> Iterator[str]:
    """The environment variables that a file sets or deletes by name, wherever it does."""
    for node in ast.walk(tree) if tree is not None else ():
        given: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environment(node.value):
            given = [node.slice]
        elif isinstance(node, ast.Call) and _changes_environment(node.func):
            given = list(node.args[:1])
            yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)
        for each in given:
            keys = each.keys if isinstance(each, ast.Dict) else [each]
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _changes_environment(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    changes = function.attr in ("setdefault", "pop", "update") and _is_environment(function.value)
    return changes or function.attr == "putenv"


def _is_environment(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", None)) == "environ"


def _parse(path: str) -> ast.Module | None:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


LARGEST_MESSAGE = 1 << 20  # bytes
_PRELOADED = "drivetrain.launch.preloaded"
_ANSWER_PATIENCE = 60.0  # seconds; it answers at once unless the machine is very busy
_END_PATIENCE = 1.0
_POLL_INTERVAL = 0.02


class Preloader:
    """The process that ranks are forked from.

    Args:
        process: That process; None where there is none.
        connection: The way to it.
        environment: The environment variables that it was started with.
        reason: Why there is none.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | None = None,
        connection: socket.socket | None = None,
        environment: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        self._process = process
        self._connection = connection
        self._environment = dict(environment or {})
        self._reason = reason
        self._ready = False
        self._calls = 0

    @classmethod
    def start(cls, options: LaunchOptions, script: str, arguments: Sequence[str] = ()) -> Preloader:
        """Start it, and return while it imports.

        Args:
            options: What was asked for.
            script: The script's path, or a module's name.
            arguments: Its arguments, which a list of processes then shows.
        """
        reason = _why_not(options, script)
        if reason is not None:
            return cls(reason=reason)
        kind = "module" if options.module else "script"
        environment = _environment(options)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_MESSAGE)
        names = options.preload or "auto"
        command = [sys.executable, *Invocation.current().options, "-m", _PRELOADED, str(theirs.fileno()), names]
        with theirs:
            process = subprocess.Popen(
                [*command, kind, script, *arguments],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is for the launcher
            )
        return cls(process, ours, environment)

    def why_not(self, environment: Mapping[str, str]) -> str | None:
        """Wait until everything is imported; the reason where ranks cannot be forked.

        Args:
            environment: The environment variables of the ranks.

        Raises:
            LaunchError: A module that `preload` names cannot be imported.
        """
        if not self._ready and self._reason is None:
            answer = self._receive(None)
            if "failed" in answer:
                raise LaunchError(f"{answer['failed']} Correct --preload, or leave it out.")
            self._ready, self._reason = "ready" in answer, answer.get("refused")
            if self._reason is not None:
                self.close()
        if self._reason is None:
            changed = self._changes(environment)
            late = sorted(name for name in changed if is_read_on_import(name) and name != THREADS_VARIABLE)
            if late:
                return f"{late[0]} has another value for the processes, and is read while torch is imported"
        return self._reason

    def fork(
        self, environment: Mapping[str, str], stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> ForkedProcess:
        """Start a rank: it runs the script with these environment variables.

        Args:
            environment: All of its variables.
            stdout: Where its output goes; where the launcher's goes if None.
            stderr: The same for what it writes to stderr.

        Raises:
            LaunchError: It could not be forked.
        """
        streams = {"stdout": stdout, "stderr": stderr}
        files = {name: stream.fileno() for name, stream in streams.items() if stream is not None}
        answer = self._call({"fork": self._changes(environment), "files": list(files)}, list(files.values()))
        if "pid" not in answer:
            raise LaunchError(f"A process could not be forked ({answer['error']}). Try again with --no_preload.")
        return ForkedProcess(answer["pid"], self)

    def poll(self, pid: int) -> int | None:
        """The exit code of a forked process, as `subprocess` gives it; None while it lives."""
        try:
            code: int | None = self._call({"poll": pid})["code"]
        except LaunchError:
            return -signal.SIGKILL  # the kernel ends all that it has forked when it ends
        return code

    def close(self) -> None:
        """End it. Forked processes that are still there end too."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(_END_PATIENCE if self._ready else 0)
            except subprocess.TimeoutExpired:
                self._process.kill()  # it may still be importing
                self._process.wait()
            self._process = None

    def __enter__(self) -> Preloader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _changes(self, environment: Mapping[str, str]) -> dict[str, str | None]:
        """What differs from its own variables; None for those that go."""
        changes: dict[str, str | None] = {
            name: value for name, value in environment.items() if self._environment.get(name) != value
        }
        changes.update(dict.fromkeys(name for name in self._environment if name not in environment))
        return changes

    def _call(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        if self._connection is None:
            raise LaunchError("The process that ranks are forked from has been closed.")
        self._calls += 1
        number = self._calls
        message = json.dumps({**request, "call": number}).encode()
        try:
            socket.send_fds(self._connection, [message], list(descriptors))
        except OSError as error:
            raise LaunchError(f"The process that ranks are forked from has ended ({error}).") from error
        # An interrupt may have left the answer to an earlier call.
        while (answer := self._receive(_ANSWER_PATIENCE)).get("call") != number:
            if "refused" in answer:
                raise LaunchError(f"The process that ranks are forked from has ended: {answer['refused']}.")
        return answer

    def _receive(self, patience: float | None) -> dict[str, Any]:
        assert self._connection is not None
        self._connection.settimeout(patience)
        try:
            message = self._connection.recv(LARGEST_MESSAGE)
        except OSError as error:
            return {"refused": f"no answer ({error})"}
        answer: dict[str, Any] = json.loads(message) if message else {"refused": "the process that imports has ended"}
        return answer


class ForkedProcess:
    """A forked rank, which the launcher treats like one of its own `subprocess.Popen`.

    Args:
        pid: Its process id.
        preloader: Its parent.

    Attributes:
        returncode: Its exit code, as `subprocess` gives it; None while it is not known to have ended.
    """

    def __init__(self, pid: int, preloader: Preloader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._preloader = preloader

    def poll(self) -> int | None:
        """The exit code, or None while it lives."""
        if self.returncode is None:
            self.returncode = self._preloader.poll(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Args:
            timeout: Seconds; without end if None.

        Raises:
            subprocess.TimeoutExpired: It still lives.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_INTERVAL)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _why_not(options: LaunchOptions, script: str) -> str | None:
    """The reason why nothing is preloaded, as far as it is known without trying."""
    if options.no_preload:
        return "--no_preload"
    if options.no_python:
        return "the script is a program of its own (--no_python)"
    if options.stand_in is not None:
        return f"--as {options.stand_in} takes effect where an interpreter starts"
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if options.preload is not None or options.module or os.path.isdir(script):
        return None
    return why_not_preload(script)


def _environment(options: LaunchOptions) -> dict[str, str]:
    """The variables that it imports under: with the number of threads of the ranks, where that is known by now."""
    environment = dict(os.environ)
    count = len(options.device_ids) if options.device_ids is not None else 1 if options.cpu else None
    if options.num_processes is not None:
        count = options.num_processes // options.max_machines
    threads = threads_per_process(options, count) if count is not None else options.num_cpu_threads_per_process
    if threads is not None:
        environment[THREADS_VARIABLE] = str(threads)
    return environment


def modules_to_import(names: str, kind: str, script: str) -> list[tuple[str, tuple[str, ...], bool]]:
    """What is imported before ranks are forked: a module, the names taken from it, and whether it was asked for.

    Args:
        names: Modules with commas in between, or `"auto"` for torch and what the top of the script imports.
        kind: `"script"` or `"module"`.
        script: Its path or name.
    """
    if names != "auto":
        return [(name.strip(), (), True) for name in names.split(",") if name.strip()]
    found = leading_imports(script) if kind == "script" else []
    return [("torch", (), False), *((each.module, each.names, False) for each in found)]
