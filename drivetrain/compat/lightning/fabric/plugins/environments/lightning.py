"""`LightningEnvironment`: processes that the launcher of a script starts."""

from __future__ import annotations

import os

from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from drivetrain.launch.notebook import free_port

__all__ = ["LightningEnvironment"]


class LightningEnvironment(ClusterEnvironment):
    """One machine, or several on which the script is started by hand with the usual variables set.

    `MASTER_ADDR`, `MASTER_PORT`, `NODE_RANK` and `LOCAL_RANK` are read; with the last one each process has been started
    by hand.
    """

    is_found_by_itself = True

    def __init__(self) -> None:
        self._rank, self._size = 0, 1
        self._port: int | None = None

    @property
    def creates_processes_externally(self) -> bool:
        """Whether each process was started by hand."""
        return "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port of the first process; a free one that stays the same where none is given."""
        if self._port is None:
            given = os.environ.get("MASTER_PORT")
            self._port = free_port() if given is None else int(given)
        return self._port

    @staticmethod
    def detect() -> bool:
        """True: it is what is left where no scheduler is found."""
        return True

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        self._size = size

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        self._rank = rank

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        return int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", 0)))

    def teardown(self) -> None:
        """Remove the number of processes from the variables, so that a further run may have another."""
        os.environ.pop("WORLD_SIZE", None)
