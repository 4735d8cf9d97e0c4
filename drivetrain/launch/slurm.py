"""The launch options that follow from a SLURM job, so that none of them has to be given on the command line.

Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.launch.options import DEFAULT_PORT
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.hosts import expand_hosts

_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
# Flags that set how machines meet.
_OWN = ("num_machines", "machine_rank", "main_process_ip", "rdzv_backend", "rdzv_endpoint")


@dataclass(frozen=True)
class SlurmJob:
    """The job, or the step of it, that this process belongs to.

    Attributes:
        job: Its number.
        hosts: Names of its machines.
        machine: Which of them this is, from 0.
        in_step: Whether srun has started this process.
        tasks: Tasks that were asked for, over all machines; None where they were not.
        tasks_here: Tasks of the step on this machine.
    """

    job: str
    hosts: tuple[str, ...]
    machine: int
    in_step: bool
    tasks: int | None
    tasks_here: int

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> SlurmJob | None:
        """Read SLURM's variables; None outside a job.

        Args:
            environ: The variables; `os.environ` if None.

        Raises:
            ConfigurationError: They cannot be read.
        """
        variables = os.environ if environ is None else environ
        job = variables.get("SLURM_JOB_ID")
        in_step = any(variables.get(name) for name in _STEP)
        listed = variables.get("SLURM_STEP_NODELIST") if in_step else None
        listed = listed or variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
        if not job or not listed:
            return None
        tasks = variables.get("SLURM_NTASKS") or variables.get("SLURM_NPROCS")
        here = (variables.get("SLURM_STEP_TASKS_PER_NODE") or "1").partition("(")[0].partition(",")[0]
        try:
            return cls(
                job=job,
                hosts=tuple(expand_hosts(listed)),
                machine=int(variables.get("SLURM_NODEID") or 0),
                in_step=in_step,
                tasks=int(tasks) if tasks and not in_step else None,
                tasks_here=int(here) if in_step else 1,
            )
        except ValueError as error:
            raise ConfigurationError(
                f"A variable of SLURM's is no number ({error}). Unset it, or SLURM_JOB_ID.", code="DT-032"
            ) from None

    @property
    def port(self) -> int:
        """Where the machines meet: one port for each job, which two jobs on a machine rarely share."""
        digits = "".join(character for character in self.job if character.isdigit())
        return 20000 + int(digits[-4:]) if digits else DEFAULT_PORT

    def options(self) -> dict[str, Any]:
        """Launch options that follow from the job.

        Raises:
            ConfigurationError: Several launchers were started by srun on one machine.
        """
        if self.tasks_here > 1:
            raise ConfigurationError(
                f"srun has started {self.tasks_here} tasks on this machine, each of which would launch processes of "
                "its own. Give srun --ntasks-per-node=1, or let it start the script itself: `srun python train.py`.",
                code="DT-037",
            )
        found: dict[str, Any] = {}
        if len(self.hosts) > 1:
            found = {
                "num_machines": len(self.hosts),
                "machine_rank": self.machine,
                "main_process_ip": self.hosts[0],
                "main_process_port": self.port,
            }
        if self.tasks is not None and self.tasks > len(self.hosts) and self.tasks % len(self.hosts) == 0:
            found["num_processes"] = self.tasks
        return found

    def srun(self, command: Sequence[str]) -> list[str]:
        """The command that runs another one once on each machine of the job, with all of its cores.

        Args:
            command: What to run.
        """
        machines = len(self.hosts)
        where = [f"--nodes={machines}", f"--ntasks={machines}", "--ntasks-per-node=1"]
        # Else srun binds each task to one core, and ends all where one machine's launcher has ended well.
        return ["srun", *where, "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", *command]


def slurm_options(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Launch options from this process's SLURM job; empty outside one, or where flags set how machines meet.

    In the batch script of a job on several machines this does not return: srun runs the same command on each.

    Args:
        given: Options that the user gave.
        environ: The variables to read; `os.environ` if None.

    Raises:
        ConfigurationError: The variables cannot be read, or srun has started several launchers on one machine.
    """
    job = SlurmJob.detect(environ)
    on_ray = given.get("launcher") == "ray"  # Ray has its own machines
    if job is None or on_ray or any(given.get(name) is not None for name in _OWN):
        return {}
    if len(job.hosts) > 1 and not job.in_step:
        # The tasks that were asked for count processes: each machine's launcher starts its share.
        if job.tasks is not None and job.tasks > len(job.hosts) and given.get("num_processes") is None:
            os.environ["DRIVETRAIN_SLURM_PROCESSES"] = str(job.tasks)
        command = job.srun([sys.executable, "-m", "drivetrain", *sys.argv[1:]])
        try:
            os.execvp(command[0], command)
        except FileNotFoundError:
            raise ConfigurationError(
                f"This job has {len(job.hosts)} machines, but there is no srun on PATH to start the launcher on each. "
                "Load SLURM's commands, or give --num_machines 1 to run on this machine alone.",
                code="DT-037",
            ) from None
    found = job.options()
    passed = (os.environ if environ is None else environ).get("DRIVETRAIN_SLURM_PROCESSES")
    if passed and job.in_step:
        found["num_processes"] = int(passed)
    return found
