"""`KubeflowEnvironment`: processes that Kubeflow's `PyTorchJob` starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ExternalEnvironment

__all__ = ["KubeflowEnvironment"]


class KubeflowEnvironment(ExternalEnvironment):
    """Environment of Kubeflow's `PyTorchJob`. Each machine has one process unless `LOCAL_RANK` is set."""

    variables: ClassVar[Mapping[str, str]] = {"world_size": "WORLD_SIZE", "global_rank": "RANK", "node_rank": "RANK"}

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Raise `NotImplementedError`: other environments set the same variables."""
        raise NotImplementedError(
            "The Kubeflow environment can't be detected automatically. Give it: plugins=KubeflowEnvironment()."
        )

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))
