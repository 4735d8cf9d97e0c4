"""The `merge-weights` command: export the weights of a checkpoint as safetensors files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from drivetrain.runtime.terminal import visible

_UNSAFE_NAME = "pytorch_model.bin"


@click.command(
    name="merge-weights",
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.argument("checkpoint")
@click.argument("output", type=click.Path(file_okay=False))
@click.option("--max-shard-size", default="5GB", show_default=True, help="Maximum size of one file, such as 500MB.")
@click.option("--dtype", default=None, help="Dtype to convert floating-point weights to, such as bfloat16.")
@click.option("--model", type=click.IntRange(min=0), default=None, help="Index of the model, if several were saved.")
@click.option("--module", default=None, help="Write only this module's weights, without its name as prefix.")
@click.option("--base", default=None, help="Base weights to merge the LoRA adapters in CHECKPOINT into.")
@click.option("--overwrite", is_flag=True, help="Allow an OUTPUT folder that is not empty.")
@click.option("--no-verify", is_flag=True, help="Do not verify the checkpoint's files against its manifest.")
@click.option("--unsafe-serialization", is_flag=True, help=f"Write {_UNSAFE_NAME}, a pickle, instead of safetensors.")
@click.option("--remove-checkpoint-dir", is_flag=True, help="Remove CHECKPOINT after its weights are written.")
def merge_weights(
    checkpoint: str,
    output: str,
    max_shard_size: str,
    dtype: str | None,
    model: int | None,
    module: str | None,
    base: str | None,
    overwrite: bool,
    no_verify: bool,
    unsafe_serialization: bool,
    remove_checkpoint_dir: bool,
) -> None:
    """Export the model weights of CHECKPOINT into the folder OUTPUT, as safetensors files.

    CHECKPOINT may have been saved with any strategy and number of processes. It may also be a sharded FSDP checkpoint
    of torch (a pytorch_model_fsdp_0 folder, or its parent), or a checkpoint of DeepSpeed's engine. Nothing in the files
    is executed.
    """
    from drivetrain.checkpoint import consolidate

    if remove_checkpoint_dir:
        # Check this before the export, which may take long.
        _check_removable(checkpoint, output)
    options: dict[str, Any] = {"module": module, "overwrite": overwrite, "progress": True}
    if base is not None:
        files = _with_adapters(checkpoint, base, output, max_shard_size, dtype, model=model, **options)
    else:
        files = consolidate(
            checkpoint,
            output,
            max_shard_size,
            dtype,
            model=model,
            verify=not no_verify,
            **options,
        )
    if unsafe_serialization:
        files = [_as_pickle(files, Path(output))]
    for path in files:
        click.echo(visible(path))
    if remove_checkpoint_dir:
        shutil.rmtree(checkpoint)


def _with_adapters(
    checkpoint: str, base: str, output: str, max_shard_size: str, dtype: str | None, module: str | None, **options: Any
) -> list[str]:
    from drivetrain import merge_adapters
    from drivetrain.runtime.errors import ConfigurationError

    if module is not None:
        raise ConfigurationError("--base writes all weights of the base under the base's names. Omit --module.")
    return merge_adapters(checkpoint, base, output, max_shard_size, dtype=dtype, **options)


def _check_removable(checkpoint: str, output: str) -> None:
    from drivetrain.runtime.errors import ConfigurationError

    source = Path(checkpoint)
    if not source.is_dir():
        raise ConfigurationError(
            f"--remove-checkpoint-dir needs a local folder, but {checkpoint!r} is not one. Omit the flag.",
        )
    if Path(output).resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(
            f"--remove-checkpoint-dir would also remove the new weights, because the output folder {output!r} is "
            f"inside {checkpoint!r}. Choose an output folder outside of the checkpoint.",
        )


def _as_pickle(files: Sequence[str], output: Path) -> str:
    import torch
    from safetensors import safe_open

    weights: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            described = file.metadata() or {}
        # Tied weights are stored once. The file's metadata maps their other names to the stored one.
        weights |= {tied: weights[first] for tied, first in described.items() if first in weights}
    target = output / _UNSAFE_NAME
    torch.save(weights, target)
    for written in (*map(Path, files), *output.glob("*.safetensors.index.json")):
        written.unlink()
    return str(target)
