"""`drivetrain import-checkpoint`: a checkpoint of another tool in this package's form."""

from __future__ import annotations

import click


@click.command(name="import-checkpoint")
@click.argument("source", type=click.Path(file_okay=False))
@click.argument("output", type=click.Path())
def import_checkpoint(source: str, output: str) -> None:
    """Convert SOURCE, which Hugging Face Accelerate's save_state wrote, into the new checkpoint OUTPUT.

    Nothing in SOURCE is executed. `Accelerator.load_state` opens SOURCE itself, too.
    """
    from drivetrain.checkpoint import import_checkpoint as convert

    click.echo(convert(source, output))
