"""Cluster environments, which the launcher finds by itself."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import ENVIRONMENT

_ABSENT = (
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "XLAEnvironment",
)

__getattr__ = absent_names(__name__, (ENVIRONMENT, _ABSENT))
