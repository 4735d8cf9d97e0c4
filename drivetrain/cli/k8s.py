"""The `k8s` command: write a Kubernetes manifest that launches a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from drivetrain.cli.batch import batch_command, write_batch


@batch_command("k8s")
@click.option("--image", required=True, help="Container image with drivetrain and the script.")
@click.option("--name", default="drivetrain", show_default=True, help="Name of the JobSet.")
@click.option("--namespace", default=None, help="Namespace. Default: the current one.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Number of machines, one pod each.")
@click.option("--gpus_per_node", type=int, default=None, help="Accelerators per machine. Default: none (CPU).")
@click.option("--gpu_resource", default="nvidia.com/gpu", show_default=True, help="Resource name of the accelerators.")
@click.option("--processes_per_node", type=int, help="Processes per machine. Default: one per accelerator.")
@click.option("--cpus_per_node", metavar="16", default=None, help="CPU cores per machine.")
@click.option("--memory", metavar="64Gi", default=None, help="Memory per machine.")
@click.option("--max_restarts", type=int, default=3, show_default=True, help="Maximum restarts of all pods.")
@click.option("--claim", default=None, help="Persistent volume claim, mounted at /data.")
def k8s(script: str, args: tuple[str, ...], flags: tuple[str, ...], file: Path | None, **values: Any) -> None:
    """Write a Kubernetes JobSet that launches SCRIPT, a path in the container image, with ARGS.

    \b
    drivetrain k8s --image registry/team/train:1 --nodes 2 --gpus_per_node 8 --file train.yaml train.py --lr 0.1
    kubectl apply -f train.yaml
    """  # noqa: D301
    import yaml

    from drivetrain.launch.slurm import JobSetManifest

    write_batch(yaml.safe_dump(JobSetManifest(**values).build(script, args, flags), sort_keys=False), file)
