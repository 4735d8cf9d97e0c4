"""`LightningEnvironment`: processes that the script's launcher starts."""

from __future__ import annotations

import os

from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from drivetrain.launch.notebook import free_port

__all__ = ["LightningEnvironment"]


class LightningEnvironment(ClusterEnvironment):
    """Default environment: one machine, or several on which the user starts the script by hand.

    `MASTER_ADDR`, `MASTER_PORT`, `NODE_RANK` and `LOCAL_RANK` are read. With `LOCAL_RANK` set, each process was started
    by hand.
    """

    is_found_by_itself = True

    def __init__(self) -> None:
        self._rank, self._size = 0, 1
        self._port: int | None = None

    @property
    def creates_processes_externally(self) -> bool:
        """True if the user started each process, which sets `LOCAL_RANK`."""
        return "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port of rank 0: `MASTER_PORT`, or a free port that is chosen once."""
        if self._port is None:
            given = os.environ.get("MASTER_PORT")
            self._port = free_port() if given is None else int(given)
        return self._port

    @staticmethod
    def detect() -> bool:
        """Return True: this environment is the fallback."""
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
        """Remove `WORLD_SIZE` from the environment, so that the next run can use another number of processes."""
        os.environ.pop("WORLD_SIZE", None)
