"""`ClusterEnvironment`: rank, world size and address of the main process."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

__all__ = ["ClusterEnvironment"]


class ClusterEnvironment(ABC):
    """Ranks and addresses from a scheduler. `Trainer(plugins=...)` and `Fabric(plugins=...)` accept an instance.

    The environments of this package are detected automatically and need not be passed. Write a subclass for a scheduler
    that is not supported.

    Attributes:
        is_found_by_itself: True if drivetrain detects this environment without the object.
    """

    is_found_by_itself: ClassVar[bool] = False

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """True if the scheduler starts the processes."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Address of rank 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port of rank 0."""

    @staticmethod
    @abstractmethod
    def detect() -> bool:
        """Return True if this process runs in the environment."""

    @abstractmethod
    def world_size(self) -> int:
        """Return the number of processes."""

    @abstractmethod
    def set_world_size(self, size: int) -> None:
        """Set the number of processes, if the environment does not define it."""

    @abstractmethod
    def global_rank(self) -> int:
        """Return the global rank of this process."""

    @abstractmethod
    def set_global_rank(self, rank: int) -> None:
        """Set the global rank of this process, if the environment does not define it."""

    @abstractmethod
    def local_rank(self) -> int:
        """Return the rank of this process on its machine."""

    @abstractmethod
    def node_rank(self) -> int:
        """Return the index of this machine."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if the arguments do not match the processes that the scheduler started."""

    def teardown(self) -> None:
        """Clean up after a run. The default does nothing."""

    def publish(self, devices: object, num_nodes: int) -> None:
        """Set the rank and address variables for drivetrain, unless it detects the environment itself."""
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
    """Base class of environments whose scheduler starts the processes and assigns ranks.

    Attributes:
        variables: The variables that hold `world_size`, `global_rank`, `local_rank` and `node_rank`.
    """

    variables: ClassVar[Mapping[str, str]]

    @property
    def creates_processes_externally(self) -> bool:
        """Always True."""
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
        # Scripts filter warnings and logs by Lightning's name.
        logger = logging.getLogger("lightning.fabric.plugins.environments")
        logger.debug(
            f"{type(self).__name__}: setting {name} is not allowed, the scheduler decides it. Ignored: {value}."
        )
