"""`TorchElasticEnvironment`: processes that torchrun starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ExternalEnvironment
from drivetrain.runtime.errors import ConfigurationError

__all__ = ["TorchElasticEnvironment"]


class TorchElasticEnvironment(ExternalEnvironment):
    """Environment of torchrun, read from its variables."""

    is_found_by_itself = True
    variables: ClassVar[Mapping[str, str]] = {
        "world_size": "WORLD_SIZE",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", 12910))

    @staticmethod
    def detect() -> bool:
        """Return True if torchrun started this process."""
        return "TORCHELASTIC_RUN_ID" in os.environ

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", 0))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        size = self.world_size()
        if num_devices * num_nodes != size:
            raise ConfigurationError(
                f"devices={num_devices} and num_nodes={num_nodes} were given, but the product ({num_devices} * "
                f"{num_nodes}) does not match the world size ({size}) that torchrun has started. Give the same numbers "
                "to both.",
            )
