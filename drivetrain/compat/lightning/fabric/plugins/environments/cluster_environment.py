"""`ClusterEnvironment`: which process this is among how many, and where the first one is."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

__all__ = ["ClusterEnvironment"]


class ClusterEnvironment(ABC):
    """The processes of a run, as a scheduler numbers them. `Trainer(plugins=...)` and `Fabric(plugins=...)` take one.

    Those of this package read variables that the core finds by itself: they need not be given. A subclass of a script
    is for schedulers that nothing here reads.

    Attributes:
        is_found_by_itself: Whether the core reads the same variables without being given this object.
    """

    is_found_by_itself: ClassVar[bool] = False

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether the scheduler starts the processes."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """The address of the first process."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """The port of the first process."""

    @staticmethod
    @abstractmethod
    def detect() -> bool:
        """Whether this process runs in such an environment."""

    @abstractmethod
    def world_size(self) -> int:
        """Number of processes."""

    @abstractmethod
    def set_world_size(self, size: int) -> None:
        """Set the number of processes, where the environment does not decide it."""

    @abstractmethod
    def global_rank(self) -> int:
        """Rank of this process among all."""

    @abstractmethod
    def set_global_rank(self, rank: int) -> None:
        """Set the rank of this process, where the environment does not decide it."""

    @abstractmethod
    def local_rank(self) -> int:
        """Rank of this process on its machine."""

    @abstractmethod
    def node_rank(self) -> int:
        """The number of this machine."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse numbers of processes other than those that the scheduler has started."""

    def teardown(self) -> None:
        """Clean up after a run."""

    def publish(self, devices: object, num_nodes: int) -> None:
        """Set the variables from which the core reads which process this is, unless it finds that by itself."""
        if self.is_found_by_itself or not self.creates_processes_externally:
            return
        if isinstance(devices, int):
            self.validate_settings(devices, num_nodes)
        size = self.world_size()
        variables = {
            "RANK": self.global_rank(),
            "WORLD_SIZE": size,
            "LOCAL_RANK": self.local_rank(),
            "LOCAL_WORLD_SIZE": size // num_nodes,
            "MASTER_ADDR": self.main_address,
            "MASTER_PORT": self.main_port,
        }
        os.environ.update({name: str(value) for name, value in variables.items()})


class ExternalEnvironment(ClusterEnvironment):
    """An environment whose scheduler starts the processes, and numbers them.

    Attributes:
        variables: The variables that hold `world_size`, `global_rank`, `local_rank` and `node_rank`.
    """

    variables: ClassVar[Mapping[str, str]]

    @property
    def creates_processes_externally(self) -> bool:
        """True."""
        return True

    def world_size(self) -> int:
        return self._read("world_size")

    def set_world_size(self, size: int) -> None:
        self._ignore("world size", size)

    def global_rank(self) -> int:
        return self._read("global_rank")

    def set_global_rank(self, rank: int) -> None:
        self._ignore("global rank", rank)

    def local_rank(self) -> int:
        return self._read("local_rank")

    def node_rank(self) -> int:
        return self._read("node_rank")

    def _read(self, name: str) -> int:
        return int(os.environ[self.variables[name]])

    def _ignore(self, name: str, value: int) -> None:
        # Under Lightning's name, by which scripts choose what they see.
        logger = logging.getLogger("lightning.fabric.plugins.environments")
        logger.debug(
            f"{type(self).__name__}: setting {name} is not allowed, the scheduler decides it. Ignored: {value}."
        )
