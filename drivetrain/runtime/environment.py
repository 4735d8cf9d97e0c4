"""Rank and world size of this process, read from the environment variables that launchers set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from drivetrain.runtime.errors import ConfigurationError

TRUE = frozenset({"1", "true", "yes", "on"})
"""Values of environment variables, in lower case, that mean yes."""


def is_set(*names: str) -> bool:
    given = (os.environ[name] for name in names if os.environ.get(name))
    return next(given, "").lower() in TRUE


# SLURM host lists


# A comma outside brackets.
_SEPARATOR = re.compile(r",(?![^\[]*\])")


def expand_hosts(hosts: str) -> list[str]:
    """Expand a SLURM host list such as `node[1-3]` to the names of its hosts.

    Example:
        ```python
        from drivetrain.runtime.environment import expand_hosts

        assert expand_hosts("node[08-10],login") == ["node08", "node09", "node10", "login"]
        ```
    """
    names: list[str] = []
    for each in _SEPARATOR.split(hosts.strip()):
        # Text and ranges alternate: rack, 1-2, n, 01-02, -ib.
        parts = re.split(r"\[([^\[\]]*)\]", each.strip())
        choices = [_expand_ranges(part, hosts) if position % 2 else [part] for position, part in enumerate(parts)]
        found = ["".join(chosen) for chosen in product(*choices)]
        if any(not name or set(name) & set("[], ") for name in found):
            raise _unreadable(hosts)
        names += found
    return names


def _expand_ranges(ranges: str, hosts: str) -> list[str]:
    numbers = []
    for each in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _unreadable(hosts)
        numbers += [f"{number:0{len(match[1])}d}" for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def _unreadable(hosts: str) -> ConfigurationError:
    return ConfigurationError(
        f"{hosts!r} is not a list of hosts. Use one such as 'node[003-005,9],other', as in SLURM_JOB_NODELIST."
    )


DEFAULT_MAIN_PORT = 29500
LAUNCHED_VARIABLE = "DRIVETRAIN_LAUNCHED"
"""Variable that drivetrain's launchers set to 1 in the processes they start, along with torchrun's variables."""
LOG_FORMAT_VARIABLE = "DRIVETRAIN_LOG_FORMAT"
LOG_FORMATS = ("text", "json")
COMMAND_VARIABLE = "DRIVETRAIN_COMMAND"
"""Variable with the shell command that started the launcher, for the launched processes."""
RESUME_VARIABLE = "DRIVETRAIN_RESUME"
"""Variable with the checkpoint that a process's first `fit` resumes by default; set by `drivetrain runs resume`."""


@dataclass(frozen=True)
class ProcessEnvironment:
    """Rank, world size and rendezvous address of a process, as set by its launcher.

    Attributes:
        rank: Global rank, 0 to `world_size` - 1.
        world_size: Number of processes of the run.
        local_rank: Rank among the processes on this machine.
        local_world_size: Number of processes on this machine.
        main_address: Host of rank 0.
        main_port: Port of rank 0's store.
        source: Launcher that set the variables: `"drivetrain launch"`, `"torchrun"`, `"slurm"`, `"openmpi"`,
            `"intelmpi"`, `"single"`, or `"torch.distributed"` if the script created the process group.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    main_address: str = "127.0.0.1"
    main_port: int = DEFAULT_MAIN_PORT
    source: str = "single"

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"Rank {self.rank} with world size {self.world_size} (from {self.source}) is not valid. Ranks go from "
                "0 to the world size - 1. Check the launcher's variables.",
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise ConfigurationError(
                f"Local rank {self.local_rank} of {self.local_world_size} processes on this machine, with world size "
                f"{self.world_size} (from {self.source}), is not valid. Check the launcher's variables.",
            )

    @property
    def is_distributed(self) -> bool:
        """True if the run has more than one process."""
        return self.world_size > 1

    @property
    def is_launched(self) -> bool:
        """True if drivetrain's launcher started this process, or if the world size is greater than 1."""
        return self.world_size > 1 or os.environ.get(LAUNCHED_VARIABLE) == "1"

    @property
    def num_nodes(self) -> int:
        """Number of machines in the run, assuming that each runs equally many processes."""
        return -(-self.world_size // self.local_world_size)

    @property
    def node_rank(self) -> int:
        """Index of this machine in the run, assuming that each runs equally many processes."""
        return self.rank // self.local_world_size

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> ProcessEnvironment:
        """Detect the process environment from the variables of torchrun, SLURM, Open MPI or Intel MPI.

        Args:
            environ: The environment variables; `os.environ` if None.

        Returns:
            The environment found, or one with world size 1.

        Raises:
            ConfigurationError: If a launcher's variables are incomplete or contradict each other.
        """
        variables = os.environ if environ is None else environ
        for source, identifying, keys in _LAUNCHERS:
            if all(variables.get(key) for key in keys[:identifying]):
                return cls._from_variables(variables, source, keys)
        for source, identifying, keys in _LAUNCHERS:
            _refuse_incomplete(variables, source, keys[:identifying])
        return cls()

    @classmethod
    def _from_variables(
        cls, variables: Mapping[str, str], source: str, keys: tuple[str, str, str, str]
    ) -> ProcessEnvironment:
        rank, world_size = (_integer(variables, key) for key in keys[:2])
        if source == "slurm" and world_size == 1:
            # An interactive `salloc` or `srun --pty` shell sets these variables too.
            return cls(source=source)
        if source == "slurm" and rank == 0 and not any(variables.get(key) for key in _SLURM_STEP):
            raise ConfigurationError(
                f"SLURM_PROCID=0 and SLURM_NTASKS={world_size} are set, but SLURM_STEP_ID is not: this is the batch "
                "script itself, which srun did not start, so there are no other ranks. Start the "
                "script with srun or `drivetrain launch`, or unset SLURM_NTASKS to run one process.",
            )
        if source == "torchrun" and variables.get(LAUNCHED_VARIABLE) == "1":
            source = "drivetrain launch"
        local_rank = _integer(variables, keys[2], default=rank if world_size == 1 else None)
        local_world_size = _integer_or_slurm_list(
            variables, keys[3], node=_integer(variables, "SLURM_NODEID", default=0) if source == "slurm" else 0
        )
        if local_world_size is None:
            # A local rank equal to the global rank suggests that there is only one machine.
            local_world_size = max(world_size if local_rank == rank else 1, local_rank + 1)
        address = variables.get("MASTER_ADDR") or _first_slurm_host(variables)
        if not address:
            if local_world_size < world_size:
                raise ConfigurationError(
                    f"MASTER_ADDR is not set, but {world_size - local_world_size} of {world_size} processes are on "
                    f"other machines (from {source}). Set MASTER_ADDR to the host name of rank 0's machine.",
                )
            address = "127.0.0.1"
        port = _integer(variables, "MASTER_PORT", default=_slurm_port(variables))
        return cls(rank, world_size, local_rank, local_world_size, address, port, source)


# Source, number of keys that identify it, (rank, world size, local rank, local world size); the first match wins.
# `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE too, so Intel MPI is identified by its local rank as well.
_LAUNCHERS: tuple[tuple[str, int, tuple[str, str, str, str]], ...] = (
    ("torchrun", 2, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    (
        "openmpi",
        2,
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    ("intelmpi", 3, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("slurm", 2, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
)


# Variables that srun sets in each task of a step but not in the batch script's shell.
_SLURM_STEP = (
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
)


def _refuse_incomplete(variables: Mapping[str, str], source: str, identifying: tuple[str, ...]) -> None:
    given = [key for key in identifying if variables.get(key)]
    rank, world_size = (variables.get(key) for key in identifying[:2])
    if not given or (rank in (None, "0") and world_size == "1"):
        return  # a single process needs no other variables
    if source == "slurm" and rank in (None, "", "0") and variables.get("SLURM_STEP_NUM_TASKS") in (None, "", "1"):
        return  # a job's shell counts as task 0, with or without the number of tasks
    if source == "intelmpi" and not (rank or world_size):
        return
    missing = ", ".join(key for key in identifying if not variables.get(key))
    raise ConfigurationError(
        f"{', '.join(f'{key}={variables[key]}' for key in given)} is set but {missing} is not. Start the script with "
        "`drivetrain launch`, torchrun or srun, or unset the variables to run one process.",
    )


def _integer(variables: Mapping[str, str], key: str, default: int | None = None) -> int:
    value = variables.get(key)
    if value in (None, ""):
        if default is None:
            raise ConfigurationError(
                f"{key} is not set, although the launcher's other variables are. Start the script with `drivetrain "
                f"launch` or torchrun, or set {key}.",
            )
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"{key}={value!r} is not an integer.") from None


def _integer_or_slurm_list(variables: Mapping[str, str], key: str, node: int) -> int | None:
    """Parse a machine's process count from a number or a SLURM list such as `2(x3),1`."""
    value = variables.get(key)
    if not value:
        return None
    counts: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(f"{key}={value!r} is not a number of processes.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _first_slurm_host(variables: Mapping[str, str]) -> str | None:
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    return expand_hosts(hosts)[0]


def _slurm_port(variables: Mapping[str, str]) -> int:
    """Derive the rendezvous port from the SLURM job ID."""
    job = variables.get("SLURM_JOB_ID", "")
    # Ports 20000 to 29999 are below the range that Linux assigns to clients.
    return 20000 + int(job[-4:]) if job[-4:].isdigit() else DEFAULT_MAIN_PORT
