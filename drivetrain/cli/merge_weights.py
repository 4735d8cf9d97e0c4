"""`drivetrain merge-weights`: plain safetensors out of a checkpoint."""

from __future__ import annotations

import click


@click.command(name="merge-weights")
@click.argument("checkpoint")
@click.argument("output", type=click.Path(file_okay=False))
@click.option("--max-shard-size", default="5GB", show_default=True, help="Bytes in a file at most, such as 500MB.")
@click.option("--dtype", default=None, help="Convert floating-point weights, such as to bfloat16.")
@click.option("--model", type=click.IntRange(min=0), default=None, help="Which model, where several were saved.")
@click.option("--module", default=None, help="Write the weights of this module alone, by their names in it.")
@click.option("--overwrite", is_flag=True, help="Write into a directory that holds something already.")
@click.option("--no-verify", is_flag=True, help="Do not check the checkpoint's files against its manifest first.")
def merge_weights(
    checkpoint: str,
    output: str,
    max_shard_size: str,
    dtype: str | None,
    model: int | None,
    module: str | None,
    overwrite: bool,
    no_verify: bool,
) -> None:
    """Write the weights in CHECKPOINT, of any strategy and number of processes, as safetensors into OUTPUT.

    CHECKPOINT may also be one that DeepSpeed's engine has written itself. Its files are pickles, which run whatever
    code they hold: open only those that you trust.
    """
    from drivetrain.checkpoint import consolidate
    from drivetrain.strategies.deepspeed.native import merge_native, native_folder

    if native_folder(checkpoint) is not None:
        files = merge_native(
            checkpoint, output, max_shard_size, dtype, module=module, overwrite=overwrite, progress=True
        )
        for path in files:
            click.echo(path)
        return
    files = consolidate(
        checkpoint,
        output,
        max_shard_size,
        dtype,
        model=model,
        module=module,
        overwrite=overwrite,
        verify=not no_verify,
        progress=True,
    )
    for path in files:
        click.echo(path)
