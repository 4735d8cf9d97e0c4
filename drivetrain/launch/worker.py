"""Entry point of each rank: prepare the process, run the script, and report a failure to the launcher.

Exceptions are written to the error file of the elastic agent, and the launcher prints the first one of all ranks.
Usage: `python -m drivetrain.launch.worker script train.py --lr 1`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib.util
import io
import os
import runpy
import signal
import sys
import traceback
import zipfile
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from drivetrain.launch.report import ERROR_FILE_VARIABLE, write_record
from drivetrain.runtime.errors import short_tracebacks
from drivetrain.runtime.heartbeat import answer_launcher, has_left_queue, set_expendable
from drivetrain.runtime.terminal import print_text

AFFINITY_VARIABLE = "DRIVETRAIN_CPU_AFFINITY"
_INTERRUPTED = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the script that `sys.argv` names in the process of one rank, and return the exit code."""
    kind, target, *arguments = sys.argv[1:]
    rank_process = os.getpid()
    # Registered before the script registers its exit handlers, so it runs after all of them.
    atexit.register(_leave_process_group, rank_process)
    if os.environ.get(ERROR_FILE_VARIABLE):
        _end_with_parent()
    _take_share_of_cores()
    for stream in (sys.stdout, sys.stderr):
        # Write whole lines, even into a pipe or under PYTHONUNBUFFERED. Otherwise the lines of several ranks mix, and
        # the last output of a killed rank is lost.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        faulthandler.enable()
    answer_launcher()
    sys.argv = [target, *arguments]
    try:
        run_module(target) if kind == "module" else run_script(target)
    except KeyboardInterrupt:
        _report("", "KeyboardInterrupt", report=os.getpid() == rank_process, exit_code=_INTERRUPTED)
        return _INTERRUPTED
    except SystemExit as stop:
        set_expendable(has_left_queue(stop))
        return _exit_code(stop, report=os.getpid() == rank_process)
    except BaseException as error:
        set_expendable(has_left_queue(error))
        _report(_traceback(error), f"{type(error).__name__}: {error}", report=os.getpid() == rank_process)
        _free_frames(error)
        return 1
    return 0


def run_script(path: str) -> None:
    """Run a Python file as `__main__`, as `python path` does.

    Unlike with `runpy`, the module stays in `sys.modules` afterwards, so that threads, exit handlers and their child
    processes still find the right `__main__`.
    """
    container = os.path.isdir(path) or zipfile.is_zipfile(path)
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # with `-P` or `-I`, sys.path must stay as it is
        # `-m` has put the working directory first. runpy adds a directory or archive itself.
        sys.path[0:1] = [] if container else [os.path.dirname(os.path.realpath(path))]
    if container or path.endswith(".pyc"):
        runpy.run_path(path, run_name="__main__")
        return
    full_path = os.path.abspath(path)
    with io.open_code(full_path) as file:
        code = compile(file.read(), full_path, "exec", dont_inherit=True)
    _run_as_main(code, full_path, loader=SourceFileLoader("__main__", full_path))


def run_module(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(
            f"No module named {name!r} that can be run with `python -m`. Check its name and PYTHONPATH.",
            name=name,
        )
    sys.argv[0] = spec.origin or name
    _run_as_main(code, spec.origin, loader=spec.loader, spec=spec)


def _run_as_main(code: CodeType, path: str | None, loader: Any, spec: ModuleSpec | None = None) -> None:
    main_module = ModuleType("__main__")
    main_module.__dict__.update(
        __builtins__=builtins,
        __file__=path,
        __cached__=spec.cached if spec is not None else None,
        __loader__=loader,
        __package__=spec.parent if spec is not None else None,
        __spec__=spec,
    )
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def _exit_code(stop: SystemExit, *, report: bool) -> int:
    """Return the exit code of a `SystemExit`."""
    if stop.code is None:
        return 0
    if not isinstance(stop.code, int):
        _report(str(stop.code), "sys.exit", report=report)
        return 1
    if stop.code != 0:
        _report("", f"sys.exit({stop.code})", report=report, exit_code=stop.code & 0xFF)
    return stop.code & 0xFF


def _report(text: str, summary: str, *, report: bool, exit_code: int = 1) -> None:
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if report and path:
        write_record(path, text, summary, exit_code)
    elif text:
        print_text(text, file=sys.stderr)


def _traceback(error: BaseException) -> str:
    """Format an exception's traceback without the frames that started the script."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    with short_tracebacks(error, trace):
        shown = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    return "".join(shown.format())


def _free_frames(error: BaseException) -> None:
    # Exit handlers detect a failed script by `sys.last_value`.
    sys.last_type, sys.last_value = type(error), error
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        # The frames of a traceback keep their objects alive, such as models.
        trace, chain.__traceback__ = chain.__traceback__, None
        if trace is not None:
            # clear_frames skips the first frame, which belongs to this file and is still running.
            traceback.clear_frames(trace)
        chain = chain.__cause__ or chain.__context__


def _leave_process_group(rank_process: int) -> None:
    # Otherwise gloo's threads are alive at interpreter exit. With a DDP model at the script's top level, this aborts
    # the process in about half of the runs (seen with torch 2.13).
    distributed = sys.modules.get("torch.distributed")
    if os.getpid() != rank_process or distributed is None or not distributed.is_available():
        return
    joined = distributed.is_initialized()
    ddp = sys.modules["torch"].nn.parallel.DistributedDataParallel
    script = vars(sys.modules["__main__"])
    names = [name for name in script if not name.startswith("__")]
    held = [name for name in names if joined or issubclass(type(script[name]), ddp)]
    for name in held:
        del script[name]
    if held:
        gc.collect()
    if joined:
        distributed.destroy_process_group()


def _is_ours(filename: str) -> bool:
    return filename in (__file__, runpy.__file__) or filename.startswith("<frozen ")


def _end_with_parent() -> None:
    """Ask Linux to kill this process when the launcher dies.

    The launcher starts ranks in sessions of their own, so no terminal signal would end them.
    """
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_share_of_cores() -> None:
    """Bind this process to its own CPU cores, if `--enable_cpu_affinity` was given."""
    if os.environ.get(AFFINITY_VARIABLE) != "1":
        return
    cores = sorted(os.sched_getaffinity(0))
    local_rank, peers = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    each = max(1, len(cores) // peers)
    start = local_rank * each % len(cores)
    os.sched_setaffinity(0, cores[start : start + each])


if __name__ == "__main__":
    # Keep this module under its own name, since the script replaces `__main__`.
    sys.modules[__spec__.name] = sys.modules["__main__"]
    sys.exit(main())
