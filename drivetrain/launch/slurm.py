"""Launch options from a SLURM job, and batch files for SLURM and Kubernetes.

This module does not import torch.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.launch.options import DEFAULT_PORT
from drivetrain.runtime.environment import expand_hosts
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE

_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
# Flags of the rendezvous. If one is given, the job's own values do not apply.
_OWN = ("num_machines", "machine_rank", "main_process_ip", "rdzv_backend", "rdzv_endpoint")


@dataclass(frozen=True)
class SlurmJob:
    """Machines and tasks of the SLURM job in which this process runs.

    Attributes:
        job: Id of the job.
        hosts: Host names of its machines.
        machine: Index of this machine in `hosts`.
        in_step: True if srun has started this process.
        tasks: Number of requested tasks over all machines, or None if not requested.
        tasks_here: Number of the step's tasks on this machine.
    """

    job: str
    hosts: tuple[str, ...]
    machine: int
    in_step: bool
    tasks: int | None
    tasks_here: int

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> SlurmJob | None:
        """Return the SLURM job that environment variables describe, or None."""
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
                f"A SLURM variable is not a number ({error}). Unset this variable, or unset SLURM_JOB_ID."
            ) from None

    @property
    def port(self) -> int:
        """Port for connecting the job's machines, derived from the job's ID."""
        digits = "".join(character for character in self.job if character.isdigit())
        return 20000 + int(digits[-4:]) if digits else DEFAULT_PORT

    def options(self) -> dict[str, Any]:
        if self.tasks_here > 1:
            raise ConfigurationError(
                f"srun has started {self.tasks_here} tasks on this machine, each of which would launch its own "
                "processes. Use srun --ntasks-per-node=1, or run the script directly: `srun python train.py`.",
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
        """Return an srun command line that runs `command` once on each machine."""
        machines = len(self.hosts)
        where = [f"--nodes={machines}", f"--ntasks={machines}", "--ntasks-per-node=1"]
        # By default srun binds each task to one core, and stops all tasks soon after one launcher has exited.
        return ["srun", *where, "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", *command]


def slurm_options(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Derive launch options, such as the number of machines, from the SLURM job that runs this process.

    Empty outside a job, or if the user gave flags about machines. In the batch script of a job with several machines,
    this function does not return: it replaces the process by srun, which runs the same command on each machine.
    """
    job = SlurmJob.detect(environ)
    on_ray = given.get("launcher") == "ray"  # Ray has its own machines
    if job is None or on_ray or any(given.get(name) is not None for name in _OWN):
        return {}
    if len(job.hosts) > 1 and not job.in_step:
        # The requested tasks are the processes of the run. Each machine's launcher starts its share.
        if job.tasks is not None and job.tasks > len(job.hosts) and given.get("num_processes") is None:
            os.environ["DRIVETRAIN_SLURM_PROCESSES"] = str(job.tasks)
        command = job.srun([sys.executable, "-m", "drivetrain", *sys.argv[1:]])
        try:
            os.execvp(command[0], command)
        except FileNotFoundError:
            raise ConfigurationError(
                f"This job has {len(job.hosts)} machines, but srun, which starts the launcher on each machine, is not "
                "on PATH. Load SLURM's commands, or pass --num_machines 1 to run on this machine only.",
            ) from None
    found = job.options()
    passed = (os.environ if environ is None else environ).get("DRIVETRAIN_SLURM_PROCESSES")
    if passed and job.in_step:
        found["num_processes"] = int(passed)
    return found


# Batch files


_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
_MEMORY = re.compile(r"\d+[KMGT]?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGTPE]i?)?")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


def _check(name: str, value: str | None, pattern: re.Pattern[str], allowed: str) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise ConfigurationError(f"{name} is {value!r}, but must be {allowed}.")


def _check_count(name: str, value: int | None, minimum: int = 1) -> None:
    if value is not None and value < minimum:
        raise ConfigurationError(f"{name} is {value}, but must be at least {minimum}.")


@dataclass(frozen=True)
class SbatchFile:
    """Template of an sbatch file that launches a script."""

    nodes: int = 1
    gpus_per_node: int | None = None
    processes_per_node: int | None = None
    cpus_per_node: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    job_name: str = "drivetrain"
    output: str = "%x-%j.out"
    signal_seconds: int = 120
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "processes_per_node", "cpus_per_node"):
            _check_count(name, getattr(self, name))
        _check_count("signal_seconds", self.signal_seconds, minimum=30)
        if self.signal_seconds > 65535:
            raise ConfigurationError(f"signal_seconds is {self.signal_seconds}, but SLURM allows at most 65535.")
        _check("time", self.time, _TIME, "minutes, MM:SS, HH:MM:SS, or D-HH:MM:SS, such as 1-12:00:00")
        _check("memory", self.memory, _MEMORY, "a number with K, M, G or T, such as 64G; 0 for all")
        for name in ("partition", "account", "job_name", "output"):
            _check(name, getattr(self, name), re.compile(r"[^\s'\"]+"), "without blanks and quotes")

    def render(self, script: str, args: Sequence[str] = (), flags: Sequence[str] = ()) -> str:
        directives: dict[str, object] = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.cpus_per_node,
            "gpus-per-node": self.gpus_per_node,
            "mem": self.memory,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "output": self.output,
            "open-mode": "append",
            "signal": f"B:USR1@{self.signal_seconds}",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
        grace = max(20, self.signal_seconds - 20)
        launch = ["drivetrain", "launch", f"--preemption_grace_period={grace}"]
        if self.processes_per_node is not None:
            launch.append(f"--num_processes={self.processes_per_node * self.nodes}")
        if self.gpus_per_node is None:
            launch.append("--cpu")
        command = shlex.join([*launch, *flags, script, *args])
        return "\n".join(
            ["#!/bin/bash", *lines, "#SBATCH --requeue", "", *self.setup, *_BODY.format(command).split("\n")]
        )


# A trap interrupts `wait` even if the launcher exits at the same moment. Only another `wait` returns its exit code.
_BODY = f"""\
{{}} &
launcher=$! code=127 signalled=1
trap 'signalled=1; kill -USR1 $launcher' USR1
trap 'signalled=1; kill -TERM $launcher' TERM
while [ $signalled ]; do
    signalled=
    wait $launcher 2>/dev/null; status=$?
    [ $status -eq 127 ] || code=$status   # 127: an earlier wait has returned its code
done

if [ $code -eq {RESUME_EXIT_CODE} ]; then   # the run has saved and can resume
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


@dataclass(frozen=True)
class JobSetManifest:
    """Template of a Kubernetes JobSet that launches a script.

    If a pod fails, all pods restart.
    """

    image: str
    name: str = "drivetrain"
    namespace: str | None = None
    nodes: int = 1
    gpus_per_node: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    processes_per_node: int | None = None
    cpus_per_node: str | None = None
    memory: str | None = None
    max_restarts: int = 3
    claim: str | None = None

    def __post_init__(self) -> None:
        for count in ("nodes", "gpus_per_node", "processes_per_node"):
            _check_count(count, getattr(self, count))
        _check_count("max_restarts", self.max_restarts, minimum=0)
        for name in ("name", "namespace", "claim"):
            _check(name, getattr(self, name), _NAME, "1 to 40 lower-case letters, digits and dashes, a letter first")
        _check("image", self.image, re.compile(r"\S+"), "the name of an image, such as registry/team/image:tag")
        for name in ("cpus_per_node", "memory"):
            _check(name, getattr(self, name), _QUANTITY, "a quantity, such as 16 or 64Gi")

    def build(self, script: str, args: Sequence[str] = (), flags: Sequence[str] = ()) -> dict[str, Any]:
        metadata = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        job = {
            "parallelism": self.nodes,
            "completions": self.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # a single pod cannot rejoin the run, so the JobSet restarts all pods
            "template": {"spec": self._pod(self._command(script, args, flags))},
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": self.max_restarts},
                "replicatedJobs": [{"name": "machine", "replicas": 1, "template": {"spec": job}}],
            },
        }

    def _command(self, script: str, args: Sequence[str], flags: Sequence[str]) -> list[str]:
        command = ["drivetrain", "launch", "--preemption_grace_period=100"]
        if self.nodes > 1:
            command += [
                f"--num_machines={self.nodes}",
                "--machine_rank=$(JOB_COMPLETION_INDEX)",  # Kubernetes substitutes the variable
                f"--main_process_ip={self.name}-machine-0-0.{self.name}",
                f"--main_process_port={DEFAULT_PORT}",
            ]
        if self.processes_per_node is not None:
            command.append(f"--num_processes={self.processes_per_node * self.nodes}")
        if self.gpus_per_node is None:
            command.append("--cpu")
        return [*command, *flags, script, *(arg.replace("$(", "$$(") for arg in args)]

    def _pod(self, command: list[str]) -> dict[str, Any]:
        resources = {"cpu": self.cpus_per_node, "memory": self.memory}
        limits: dict[str, Any] = {name: value for name, value in resources.items() if value is not None}
        if self.gpus_per_node is not None:
            limits[self.gpu_resource] = self.gpus_per_node
        mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
        if self.claim is not None:
            mounts.append({"name": "data", "mountPath": "/data"})
            volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": self.claim}})
        container: dict[str, Any] = {
            "name": "drivetrain",
            "image": self.image,
            "command": command,
            "volumeMounts": mounts,
            **({"resources": {"limits": limits}} if limits else {}),
        }
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 120,
            "containers": [container],
            "volumes": volumes,
        }
