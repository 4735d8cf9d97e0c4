"""Runs several programs, each in a process that is forked once what they all import is there: `several.py JOBS`.

A launcher starts it: torchrun for the original framework, `drivetrain launch --as accelerate` (or lightning) for ours.
Of each job every rank forks a process of its own, which meets those of the other ranks. A process that has computed
nothing, and has one thread, is all that a program finds.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "DRIVETRAIN_NUM")
# What a rank may still say once another has failed.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02


def expecting_failure(name: str, check):
    """A check that must fail, so that the list of them stays true."""

    def run(*args, **kwargs):
        try:
            check(*args, **kwargs)
        except (Exception, SystemExit) as error:
            print(f"as expected, {name} does not hold: {type(error).__name__}: {error}")
        except BaseException as error:  # pytest's own kind of failure is none of Exception
            if type(error).__name__ != "Failed":
                raise
            print(f"as expected, {name} does not hold: {error}")
        else:
            raise AssertionError(f"{name} holds, so it is to be taken off the list of checks that do not")

    return run


def run_program(script: Path, unlike: list[str]) -> None:
    """Run a script as Python would; where checks are expected to fail, its `main` with these replaced."""
    module = ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    if unlike:
        sys.modules["script"] = module
        module.__name__ = "script"
    exec(compile(script.read_text(), str(script), "exec"), module.__dict__)
    for name in unlike:
        setattr(module, name, expecting_failure(name, getattr(module, name)))
    if unlike:
        module.main()


def be_the_program(job: dict) -> int:
    """Become a rank of a job, to its end.

    Returns:
        The exit code.
    """
    script = Path(job["script"])
    output = os.open(log_of(job), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.dump_traceback_later(job["timeout"] - 2, exit=True)
    for name in [name for name in os.environ if job["alone"] and name.startswith(OF_LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(job["variables"])
    os.environ.update(COMPAT_FOLDER=job["folder"], COMPAT_RESULT=job["result"])
    if "RANK" in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
    os.chdir(job["folder"])
    sys.path[:0] = [str(script.parent), *job["path"]]
    sys.argv = [str(script), *job["arguments"]]
    try:
        if os.environ.get("DRIVETRAIN_TESTS_DEVICE") == "sim":
            importlib.import_module("tests.simulated.devices").start(int(os.environ.get("WORLD_SIZE", "1")))
        if job["before"]:
            importlib.import_module(f"tests.compat.{job['before'].removesuffix('.py')}").prepare()
        run_program(script, job["unlike"])
    except SystemExit as end:
        if end.code not in (None, 0):
            print(f"ended with {end.code}")
            return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def log_of(job: dict) -> str:
    return f"{job['base']}.rank{os.environ.get('RANK', '0')}.log"


def end_of(job: dict, rank: int) -> Path:
    return Path(f"{job['base']}.rank{rank}.end")


def fork(job: dict) -> int:
    """Start a rank of a job."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = be_the_program(job)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run(job: dict, rank: int, ranks: int) -> None:
    """Run a job and write how it ended; a rank whose peer has failed does not wait for it."""
    started = time.monotonic()
    deadline = started + job["timeout"]
    pid = fork(job)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        for other in set(range(ranks)) - {rank}:
            with contextlib.suppress(FileNotFoundError, ValueError):
                if json.loads(end_of(job, other).read_text())["code"]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)
    seconds = round(time.monotonic() - started, 2)
    end_of(job, rank).write_text(json.dumps({"code": os.waitstatus_to_exitcode(ended[1]), "seconds": seconds}))


def main() -> None:
    imported, jobs = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for name in imported:
        importlib.import_module(name)
    # jemalloc's own thread, which pyarrow starts, ends and starts again around a fork.
    threads = {Path(f"/proc/self/task/{each}/comm").read_text().strip() for each in os.listdir("/proc/self/task")}
    assert threading.active_count() == 1, f"{threading.enumerate()}: a process that has several must not be forked"
    assert len(threads - {"jemalloc_bg_thd"}) == 1, f"{threads}: a process that has several must not be forked"
    gc.collect()
    gc.freeze()
    for job in jobs:
        run(job, rank, ranks)


if __name__ == "__main__":
    main()
