"""`XLAEnvironment`: processes on TPUs."""

from __future__ import annotations

import importlib
from typing import Any

from drivetrain.compat.lightning.accelerators import XLAAccelerator
from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ExternalEnvironment

__all__ = ["XLAEnvironment"]


class XLAEnvironment(ExternalEnvironment):
    """Environment of TPUs, read from the runtime of `torch_xla`."""

    is_found_by_itself = True

    @property
    def creates_processes_externally(self) -> bool:
        """Always False: the launcher starts the processes."""
        return False

    @property
    def main_address(self) -> str:
        raise NotImplementedError("The processes of a TPU pod find each other by themselves, without an address.")

    @property
    def main_port(self) -> int:
        raise NotImplementedError("The processes of a TPU pod find each other by themselves, without a port.")

    @staticmethod
    def detect() -> bool:
        """Return True if a TPU is available."""
        return XLAAccelerator.is_available()

    def world_size(self) -> int:
        return int(_runtime().world_size())

    def global_rank(self) -> int:
        return int(_runtime().global_ordinal())

    def local_rank(self) -> int:
        return int(_runtime().local_ordinal())

    def node_rank(self) -> int:
        return int(_runtime().host_index())


def _runtime() -> Any:
    return importlib.import_module("torch_xla.runtime")
