"""`SLURMEnvironment`: processes that `srun` starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from typing import ClassVar

from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ExternalEnvironment
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning
from drivetrain.runtime.errors import ConfigurationError, LaunchError

__all__ = ["SLURMEnvironment"]

# First host of a SLURM list: the prefix, the first number in brackets, and the suffix
_FIRST_HOST = re.compile(r"([^\[,\s]*)(?:\[([^\],-]+)[^\]]*\]([^,\s]*))?")


class SLURMEnvironment(ExternalEnvironment):
    """Environment of SLURM, read from its variables."""

    is_found_by_itself = True
    variables: ClassVar[Mapping[str, str]] = {
        "world_size": "SLURM_NTASKS",
        "global_rank": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
    }

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        self.auto_requeue, self.requeue_signal = auto_requeue, requeue_signal
        _warn_without_srun()
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if _is_started_by_srun() and tasks != "1" and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise LaunchError(
                f"You set `--ntasks={tasks}` in your SLURM script, which leaves open how many run on each machine. "
                f"Use `--ntasks-per-node={tasks}` instead."
            )

    @property
    def main_address(self) -> str:
        """Address of rank 0: `MASTER_ADDR`, or the first host of the job."""
        given = os.environ.get("MASTER_ADDR")
        return self.resolve_root_node_address(os.environ.get("SLURM_NODELIST", "127.0.0.1")) if given is None else given

    @property
    def main_port(self) -> int:
        """Port of rank 0: `MASTER_PORT`, or a port derived from the job ID so that all processes agree."""
        given, job = os.environ.get("MASTER_PORT"), os.environ.get("SLURM_JOB_ID")
        if given is not None:
            return int(given)
        return 12910 if job is None else 15000 + int(job[-4:])

    @staticmethod
    def detect() -> bool:
        """Return True if `srun` started this process."""
        _warn_without_srun()
        return _is_started_by_srun()

    @staticmethod
    def job_name() -> str | None:
        """Return the name of the SLURM job, or None."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """Return the ID of the SLURM job, or None in an interactive job."""
        number = os.environ.get("SLURM_JOB_ID")
        return None if number is None or not number.isdigit() or _is_interactive() else int(number)

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """Return the first host of a SLURM node list."""
        found = _FIRST_HOST.match(nodes.strip())
        return "".join(part for part in found.groups() if part) if found else nodes

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if _is_interactive():
            return
        for name, option, given, argument in (
            ("SLURM_NTASKS_PER_NODE", "tasks per node", num_devices, "devices"),
            ("SLURM_NNODES", "nodes", num_nodes, "num_nodes"),
        ):
            configured = os.environ.get(name)
            if configured is not None and int(configured) != given:
                flag = "--ntasks-per-node" if argument == "devices" else "--nodes"
                raise ConfigurationError(
                    f"{argument}={given} was given, but the number of {option} configured in SLURM "
                    f"(`{flag}={configured}`) does not match. Give the same number to both.",
                )


def _is_interactive() -> bool:
    return SLURMEnvironment.job_name() in ("bash", "interactive")


def _is_started_by_srun() -> bool:
    return "SLURM_NTASKS" in os.environ and not _is_interactive()


def _warn_without_srun() -> None:
    if not _is_started_by_srun() and shutil.which("srun") is not None:
        rank_zero_warn(
            "The `srun` command is available on your system but is not used. HINT: to run on SLURM, start the script "
            f"by it: srun python {' '.join(sys.argv[:4])} ...",
            category=PossibleUserWarning,
        )
