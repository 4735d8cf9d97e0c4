"""Relaunch of the running script as several processes, which `Trainer(devices=2)` does in `python train.py`."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import NoReturn

from drivetrain.launch.interpreter import Invocation
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import LaunchError


def already_launched() -> bool:
    """Return True if this process was started by a launcher such as `drivetrain launch` or torchrun."""
    return ProcessEnvironment.detect().is_launched


def relaunch_script(num_processes: int, cpu: bool = False) -> NoReturn:
    """Run this script again in several processes, then exit with that run's exit code.

    The script runs from its start in each process, with the same arguments and interpreter options. Code before this
    call therefore runs once in this process and once more in each new one.

    Args:
        num_processes: Number of processes to start.
        cpu: Run them on the CPU even if there are accelerators.

    Raises:
        LaunchError: There is no script to run: this is a notebook, an interactive session, `python -c`, a script from
            stdin, a test, or a child process.

    Example:
        ```python
        from drivetrain.launch import already_launched, relaunch_script

        def two_processes() -> None:
            if not already_launched():
                relaunch_script(num_processes=2, cpu=True)
        ```
    """
    invocation = Invocation.parse()
    if (where := _why_not(invocation)) is not None:
        raise LaunchError(
            f"{num_processes} processes were requested, but {where}, so there is no script to run in each of them. "
            "In a notebook or an interactive session, put the training into a function and call "
            f"`notebook_launcher(function, num_processes={num_processes})` from drivetrain.launch. "
            f"Otherwise save it as a file and run `drivetrain launch --num_processes {num_processes} file.py`."
        )
    from drivetrain.launch.launcher import launch_script  # slow to import, and most Trainers do not relaunch
    from drivetrain.launch.options import LaunchOptions

    options = LaunchOptions(num_processes=num_processes, cpu=cpu, module=invocation.kind == "module")
    target = invocation.target
    if not options.module and not os.path.exists(target):  # the working directory has changed since the start
        target = str(getattr(sys.modules["__main__"], "__file__", target))
    sys.exit(launch_script(options, target, invocation.arguments))


def _why_not(invocation: Invocation) -> str | None:
    if multiprocessing.parent_process() is not None:
        return "this is a child process that another Python process started"
    if "PYTEST_CURRENT_TEST" in os.environ:
        return "this is a test"
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return "this is a notebook or an IPython session"
    if invocation.kind == "command":
        return "this is `python -c`"
    if invocation.kind == "stdin":
        return "this is an interactive session" if sys.stdin.isatty() else "the program is read from stdin"
    return None
