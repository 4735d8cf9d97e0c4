"""Starting the processes with mpirun, on the hosts of a file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from drivetrain.launch.interpreter import Invocation
from drivetrain.launch.options import DEFAULT_PORT, LaunchOptions
from drivetrain.launch.plan import LaunchPlan
from drivetrain.runtime.errors import ConfigurationError, LaunchError

_PROGRAMS = ("mpirun", "mpiexec")
_LOOPBACK = "127.0.0.1"


def launch_with_mpi(options: LaunchOptions, script: str, args: Sequence[str] = ()) -> int:
    """Run a script as several processes that mpirun starts, and wait for them.

    Ranks find their place from MPI's variables.

    Args:
        options: How many processes, where, and with which settings.
        script: The script's path, or a module's or program's name if the options ask for that.
        args: Its arguments, passed on as they are.

    Returns:
        The exit code of mpirun.

    Raises:
        ConfigurationError: The options do not fit this machine.
        LaunchError: There is no mpirun.
    """
    command, variables = mpi_command(options, script, args)
    return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def mpi_command(options: LaunchOptions, script: str, args: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The command line for mpirun, and the environment variables that its processes get.

    Args:
        options: How many processes, where, and with which settings.
        script: What they run.
        args: Its arguments.

    Raises:
        ConfigurationError: The options do not fit this machine.
        LaunchError: There is no mpirun.
    """
    program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        raise LaunchError(
            f"mpirun_hostfile={options.mpirun_config['mpirun_hostfile']!r} asks for mpirun, but neither "
            f"{' nor '.join(_PROGRAMS)} is on PATH. Install Open MPI (apt-get install openmpi-bin) or Intel MPI, or "
            "leave it out: drivetrain's own launcher needs neither."
        )
    if options.min_machines != options.max_machines:
        raise ConfigurationError(
            f"num_machines is {options.num_machines!r}, but mpirun starts a fixed number. Give a single one.",
            code="DT-033",
        )
    plan = LaunchPlan.make(options)
    variables = {
        **plan.variables,
        "MASTER_ADDR": options.main_process_ip or _LOOPBACK,
        "MASTER_PORT": str(options.main_process_port or DEFAULT_PORT),
    }
    total, here = plan.local_processes * options.max_machines, plan.local_processes
    hosts = os.path.expanduser(options.mpirun_config["mpirun_hostfile"])
    if _is_open_mpi(program):
        places = ["--hostfile", hosts, "-n", str(total), "--npernode", str(here), "--bind-to", "none"]
        places += [part for name in sorted(variables) for part in ("-x", name)]
    else:
        places = ["-f", hosts, "-n", str(total), "-ppn", str(here)]
    if options.no_python:
        return [program, *places, script, *args], variables
    interpreter = [sys.executable, *Invocation.current().options]
    return [program, *places, *interpreter, *(["-m"] if options.module else []), script, *args], variables


def _is_open_mpi(program: str) -> bool:
    try:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} --version failed: {error}. Check that MPI is installed.") from None
    return "Open MPI" in shown
