"""Cluster environments, which read ranks and addresses from a scheduler."""

from __future__ import annotations

from drivetrain.compat.lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from drivetrain.compat.lightning.fabric.plugins.environments.kubeflow import KubeflowEnvironment
from drivetrain.compat.lightning.fabric.plugins.environments.lightning import LightningEnvironment
from drivetrain.compat.lightning.fabric.plugins.environments.lsf import LSFEnvironment
from drivetrain.compat.lightning.fabric.plugins.environments.mpi import MPIEnvironment
from drivetrain.compat.lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from drivetrain.compat.lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from drivetrain.compat.lightning.fabric.plugins.environments.xla import XLAEnvironment

__all__ = [
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "XLAEnvironment",
]
