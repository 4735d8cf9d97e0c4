"""The process that ranks are forked from: it imports what they need, waits for calls, and becomes a rank in each fork.

Started by the launcher as `python -m drivetrain.launch.preloaded FD NAMES script train.py --lr 1`. See `preload.py`
for the other side.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from drivetrain.launch.options import THREADS_VARIABLE
from drivetrain.launch.preload import LARGEST_MESSAGE, modules_to_import
from drivetrain.launch.worker import end_with_parent, leave_process_group, run_rank
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import LaunchError
from drivetrain.runtime.state import PartialState
from drivetrain.runtime.terminal import flush_output

# The first optimizer step or DDP model of every process imports it otherwise, which takes as long as torch itself.
_WITH_TORCH = ("torch._dynamo",)
# A signal meant for the script's processes, such as that of `pkill -f train.py`, is not for their parent.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/davinci", "/dev/vfio")
# With it, `torch.cuda.is_available()` in an import does not start the driver.
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_STREAMS = {"stdout": 1, "stderr": 2}


def main() -> int:
    """Import, then fork a rank at each call of the launcher.

    Returns:
        In a rank, its exit code.
    """
    end_with_parent()
    descriptor, names, kind, target, *arguments = sys.argv[1:]
    rank: list[int] = []
    # Before anything registers more, as in a rank that imports for itself.
    atexit.register(leave_process_group, rank)
    launcher = socket.socket(fileno=int(descriptor))
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    before = list(sys.path)
    with _path_of(kind, target):
        answer = _import(names, kind, target)
    sys.path[:] = before
    launcher.send(json.dumps(answer).encode())
    if "ready" not in answer:
        return 0
    flush_output()
    _serve(launcher)
    rank.append(os.getpid())
    worker = ["-m", "drivetrain.launch.worker", *sys.argv[3:]]
    sys.orig_argv[sys.orig_argv.index("-m") :] = worker
    return run_rank(kind, target, *arguments)


# importing


@contextlib.contextmanager
def _path_of(kind: str, target: str) -> Iterator[None]:
    """Look for modules where the script will."""
    if kind == "script" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
    yield


def _import(names: str, kind: str, target: str) -> dict[str, Any]:
    """Import the modules; what to answer to the launcher."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return {"refused": "a tracer or profiler runs in every interpreter"}
    set_here = _NVML_CHECK not in os.environ
    os.environ.setdefault(_NVML_CHECK, "1")
    for module, taken, asked in modules_to_import(names, kind, target):
        if not asked and not _is_installed(module):
            continue  # the script has a file of that name, which may do anything
        try:
            loaded = importlib.import_module(module)
            for name in taken:
                with contextlib.suppress(Exception):
                    getattr(loaded, name)  # some packages import only now
        except Exception as error:
            if asked:
                return {"failed": f"{module!r} cannot be imported ({type(error).__name__}: {error})."}
            # Each rank shows it, where the script imports it.
    if "torch" in sys.modules:
        environment = dict(os.environ)
        for module in _WITH_TORCH:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]  # a rank that needs it sets it
    if set_here:
        os.environ.pop(_NVML_CHECK, None)
    reason = _why_not_fork()
    return {"refused": reason} if reason is not None else {"ready": True}


def _is_installed(module: str) -> bool:
    """Whether a module comes from an installed package, rather than from a file of the script's."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return False
    origin = spec.origin if spec is not None else None
    own = sys.modules["drivetrain"].__file__  # installed or not, it is what the ranks import
    return origin is not None and (origin == own or "site-packages" in origin or "dist-packages" in origin)


def _why_not_fork() -> str | None:
    """The reason why this process cannot be forked; None where it can."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"an import has started a thread ({names})"
    if _native_threads() > 1:
        # OpenBLAS has some, and ends them before a fork.
        if (probe := os.fork()) == 0:
            os._exit(0)
        os.waitpid(probe, 0)
        if (count := _native_threads()) > 1:
            return f"an import has started {count - 1} thread(s) of native code"
    if _has_children():
        return "an import has started a process"
    if "torch" in sys.modules:
        from drivetrain.runtime.devices import started_device

        if (kind := started_device()) is not None:
            return f"an import has touched a {kind} device"
    touched = _open_devices()
    return f"an import has opened {touched[0]}" if touched else None


def _open_devices() -> list[str]:
    """Device files of accelerators that this process holds open: their drivers' state does not survive a fork."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path.startswith(_DEVICE_FILES):
                found.append(path)
    return found


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


# forking


def _serve(launcher: socket.socket) -> None:
    """Answer the launcher's calls; returns in each forked rank, and only there."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(launcher, LARGEST_MESSAGE, len(_STREAMS))
        if not message:
            os._exit(0)
        request = json.loads(message)
        answer: dict[str, Any] = {"call": request["call"]}
        if "fork" in request:
            # Until the rank has its own handlers, a signal waits.
            signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
            try:
                answer["pid"] = os.fork()
            except OSError as error:
                answer["error"] = str(error)
            if answer.get("pid") == 0:
                launcher.close()
                _become_rank(request, descriptors)
                return
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        else:
            answer["code"] = _exit_code(request["poll"])
        for descriptor in descriptors:
            os.close(descriptor)
        launcher.send(json.dumps(answer).encode())


def _exit_code(pid: int) -> int | None:
    """The exit code of a rank, as `subprocess` gives it; None while it lives."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become_rank(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process what a fresh interpreter would be."""
    os.setsid()
    for name, descriptor in zip(request["files"], descriptors, strict=True):
        os.dup2(descriptor, _STREAMS[name])
        os.close(descriptor)
    threads = os.environ.get(THREADS_VARIABLE)
    for name, value in request["fork"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for number in _IGNORED:  # the launcher handles them, so an interpreter that it starts does not inherit any
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    # Python's own generator gets a new seed in a fork by itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    given = os.environ.get(THREADS_VARIABLE)
    if given != threads and given is not None:
        _use_threads(int(given.partition(",")[0]))


def _use_threads(count: int) -> None:
    """Do what OMP_NUM_THREADS would have done to libraries that were loaded before it was set."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    if "threadpoolctl" in sys.modules:
        sys.modules["threadpoolctl"].threadpool_limits(count)
        return
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        libraries = {line.split(maxsplit=5)[-1].strip() for line in file if "openblas" in line}
    for path in libraries:
        for name in ("openblas_set_num_threads", "scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_"):
            with contextlib.suppress(OSError, AttributeError):
                getattr(ctypes.CDLL(path), name)(count)


if __name__ == "__main__":
    # Kept under its own name: the script takes the place of `__main__`.
    sys.modules[__spec__.name] = sys.modules["__main__"]
    sys.exit(main())


# What starting ranks out of a notebook's process needs


_MOST_LINES = 12


class NotebookError(LaunchError):
    """A process failed. A notebook shows the message in 12 lines at most, without the launcher's own frames."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the cell."""
        lines = str(self).splitlines()
        left_out = len(lines) - _MOST_LINES
        if left_out <= 0:
            return lines
        note = f"  ... {left_out + 1} lines are left out: `import sys; print(sys.last_value)` shows all"
        return [*lines[:2], note, *lines[left_out + 3 :]]


def cloudpickle_module() -> Any:
    """What pickles functions by value, where it is installed, by itself or as a part of joblib; else None."""
    for name in ("cloudpickle", "joblib.externals.cloudpickle"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refuse_existing_state() -> None:
    """Raise where this process has taken its place in a run, which a function's processes would inherit.

    Raises:
        LaunchError: It has.
    """
    if PartialState.existing() is not None:
        raise LaunchError(
            "An Accelerator, Trainer or PartialState exists in this process already, so its processes could "
            "not make their own. Restart the kernel, and make it only inside the function given to "
            "notebook_launcher."
        )


def refuse_what_a_fork_would_break(kind: str) -> None:
    """Raise where this process cannot be forked into ranks.

    Args:
        kind: Name of the kind of device that they run on.

    Raises:
        LaunchError: Something is in the way; the message names it.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            "This system has no fork, which starting processes from a notebook needs. Save the training as a file and "
            "run `drivetrain launch` on it."
        )
    if get_device_kind(kind).is_started():
        raise LaunchError(
            f"{kind} is in use in this process already, and its state does not survive a fork. Restart the "
            f"kernel, and touch {kind} only in the processes that are started (inside the function given to "
            'notebook_launcher, or the hooks of a task), or start new interpreters: start_method="spawn" of '
            "notebook_launcher, strategy='ddp_spawn' of a Trainer."
        )
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("Processes must be forked from the main thread, where that is safe.")
