"""`LSFEnvironment`: processes that `jsrun` starts on an LSF cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ExternalEnvironment
from drivetrain.runtime.errors import ConfigurationError

__all__ = ["LSFEnvironment"]

_RANKFILE, _JOB = "LSB_DJOB_RANKFILE", "LSB_JOBID"


class LSFEnvironment(ExternalEnvironment):
    """Environment of LSF and `jsrun`, read from their variables and rank file."""

    variables: ClassVar[Mapping[str, str]] = {
        "world_size": "JSM_NAMESPACE_SIZE",
        "global_rank": "JSM_NAMESPACE_RANK",
        "local_rank": "JSM_NAMESPACE_LOCAL_RANK",
    }

    def __init__(self) -> None:
        self._hosts = _hosts()
        self._port = _port()

    @property
    def main_address(self) -> str:
        return self._hosts[0]

    @property
    def main_port(self) -> int:
        """Port of rank 0, derived from the job ID so that all processes agree."""
        return self._port

    @staticmethod
    def detect() -> bool:
        """Return True if `jsrun` started this process."""
        return all(name in os.environ for name in (_RANKFILE, _JOB, "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"))

    def node_rank(self) -> int:
        return self._hosts.index(socket.gethostname())

    def _read(self, name: str) -> int:
        variable = self.variables[name]
        if not os.environ.get(variable):
            raise ConfigurationError(f"Cannot determine {name}: {variable} is not set. Start the script with `jsrun`.")
        return super()._read(name)


def _hosts() -> list[str]:
    """Return the compute hosts of the rank file. Its first host, which submits the job, is left out."""
    path = os.environ.get(_RANKFILE)
    if path is None:
        raise ConfigurationError(f"Did not find the environment variable `{_RANKFILE}`. Start the script with `jsrun`.")
    if not path:
        raise ConfigurationError(f"The environment variable `{_RANKFILE}` is empty. It names the list of machines.")
    hosts = list(dict.fromkeys(line.strip() for line in Path(path).read_text().splitlines() if line.strip()))
    if len(hosts) < 2:
        raise ConfigurationError(f"{path}, which `{_RANKFILE}` names, lists no machine that computes.")
    return hosts[1:]


def _port() -> int:
    given = os.environ.get("MASTER_PORT")
    if given is not None:
        return int(given)
    job = os.environ.get(_JOB)
    if not job:
        raise ConfigurationError(f"Could not find job id in environment variable {_JOB}. Set it, or MASTER_PORT.")
    return 10000 + int(job) % 1000
