"""The `import-checkpoint` command: convert another tool's checkpoint."""

from __future__ import annotations

import click

from drivetrain.runtime.terminal import visible


@click.command(name="import-checkpoint")
@click.argument("source", type=click.Path())
@click.argument("output", type=click.Path())
def import_checkpoint(source: str, output: str) -> None:
    """Convert SOURCE, another tool's save_state folder or .ckpt file, into the new checkpoint OUTPUT.

    Nothing in SOURCE is executed. `Accelerator.load_state` and `Trainer.fit` also open such checkpoints directly.
    """
    from drivetrain.checkpoint import import_checkpoint as convert

    click.echo(visible(convert(source, output)))
