"""`drivetrain import-checkpoint`: a checkpoint of another tool in this package's form."""

from __future__ import annotations

import click

from drivetrain.runtime.terminal import visible


@click.command(name="import-checkpoint")
@click.argument("source", type=click.Path())
@click.argument("output", type=click.Path())
def import_checkpoint(source: str, output: str) -> None:
    """Convert SOURCE, a folder of another tool's save_state or a .ckpt file, into the new checkpoint OUTPUT.

    Nothing in SOURCE is executed. `Accelerator.load_state` opens the one itself, too, and `Trainer.fit` the other.
    """
    from drivetrain.checkpoint import import_checkpoint as convert

    click.echo(visible(convert(source, output)))
