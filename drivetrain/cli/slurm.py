"""The `slurm` command: write an sbatch file that launches a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from drivetrain.cli.batch import batch_command, write_batch


@batch_command("slurm")
@click.option("--nodes", type=int, default=1, show_default=True, help="Number of machines.")
@click.option("--gpus_per_node", type=int, default=None, help="Accelerators per machine. Default: none (CPU).")
@click.option("--processes_per_node", type=int, help="Processes per machine. Default: one per accelerator.")
@click.option("--cpus_per_node", type=int, default=None, help="CPU cores per machine.")
@click.option("--memory", metavar="64G", default=None, help="Memory per machine; 0 for all.")
@click.option("--time", metavar="D-HH:MM:SS", default=None, help="Time limit of the job.")
@click.option("--partition", default=None, help="Partition.")
@click.option("--account", default=None, help="Account to charge.")
@click.option("--job_name", default="drivetrain", show_default=True, help="Name of the job.")
@click.option("--output", default="%x-%j.out", show_default=True, help="File for the job's output.")
@click.option("--signal_seconds", type=int, default=120, show_default=True, help="Seconds from saving to the limit.")
@click.option("--setup", multiple=True, metavar="LINE", help="Shell line to run first. Repeat it for several lines.")
def slurm(
    script: str, args: tuple[str, ...], flags: tuple[str, ...], file: Path | None, setup: tuple[str, ...], **values: Any
) -> None:
    """Write an sbatch file that runs the script SCRIPT with the arguments ARGS on a SLURM cluster.

    Before the job's time limit, the script saves a checkpoint and the job is requeued. It then resumes from the
    checkpoint.

    \b
    drivetrain slurm --nodes 2 --gpus_per_node 8 --time 1-00:00:00 --file train.sbatch train.py --lr 0.1
    sbatch train.sbatch
    """  # noqa: D301
    from drivetrain.launch.slurm import SbatchFile

    write_batch(SbatchFile(setup=setup, **values).render(script, args, flags), file)
