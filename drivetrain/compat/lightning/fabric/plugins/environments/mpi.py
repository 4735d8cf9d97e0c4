"""`MPIEnvironment`: processes that `mpirun` starts."""

from __future__ import annotations

import importlib.util
import socket
from typing import Any

from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ExternalEnvironment
from drivetrain.launch.notebook import free_port

__all__ = ["MPIEnvironment"]

_MPI4PY_AVAILABLE = importlib.util.find_spec("mpi4py") is not None


class MPIEnvironment(ExternalEnvironment):
    """Environment of MPI, read through `mpi4py`."""

    is_found_by_itself = True

    def __init__(self) -> None:
        self._comm_world = _world()
        self._comm_local: Any = None
        self._node_rank: int | None = None
        self._main_address: str | None = None
        self._main_port: int | None = None

    @property
    def main_address(self) -> str:
        """Host name of rank 0, which broadcasts it to the other ranks."""
        if self._main_address is None:
            self._main_address = str(self._comm_world.bcast(socket.gethostname(), root=0))
        return self._main_address

    @property
    def main_port(self) -> int:
        """Free port on the machine of rank 0, which broadcasts it to the other ranks."""
        if self._main_port is None:
            self._main_port = int(self._comm_world.bcast(free_port(), root=0))
        return self._main_port

    @staticmethod
    def detect() -> bool:
        """Return True if there are several MPI processes."""
        return _MPI4PY_AVAILABLE and bool(_world().Get_size() > 1)

    def world_size(self) -> int:
        return int(self._comm_world.Get_size())

    def global_rank(self) -> int:
        return int(self._comm_world.Get_rank())

    def local_rank(self) -> int:
        self._group_by_machine()
        return int(self._comm_local.Get_rank())

    def node_rank(self) -> int:
        self._group_by_machine()
        assert self._node_rank is not None
        return self._node_rank

    def _group_by_machine(self) -> None:
        """Assign numbers to the machines by their lowest rank. Call it on all processes."""
        if self._node_rank is not None:
            return
        mine = socket.gethostname()
        all_names = self._comm_world.gather(mine, root=0)  # None on the others
        machines = self._comm_world.bcast(None if all_names is None else list(dict.fromkeys(all_names)), root=0)
        self._node_rank = int(machines.index(mine))
        self._comm_local = self._comm_world.Split(color=self._node_rank)


def _world() -> Any:
    if not _MPI4PY_AVAILABLE:
        raise ModuleNotFoundError("MPIEnvironment needs mpi4py: pip install mpi4py")
    # "from mpi4py import MPI", imported dynamically because the package has no type hints.
    return __import__("mpi4py", fromlist=["MPI"]).MPI.COMM_WORLD
