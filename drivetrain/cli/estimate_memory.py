"""`drivetrain estimate-memory`: what a model takes in training and in inference, before any of it is there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from drivetrain.runtime.byte_sizes import as_bytes
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.cli.model_size import ModelSize

_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
_STRATEGIES = ("ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "tp", "cp", "pp")


class EstimateCommand(click.Command):
    """The command, whose `--dtypes` takes several values after it, as Accelerate's does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give each value of `--dtypes` a flag of its own."""
        spread: list[str] = []
        follows = False
        for arg in args:
            if follows and arg in _DTYPES:
                spread += ["--dtypes", arg]
                continue
            follows = arg == "--dtypes"
            if not follows:
                spread.append(arg)
        return super().parse_args(ctx, spread)


@click.command(
    name="estimate-memory",
    cls=EstimateCommand,
    context_settings={
        "token_normalize_func": lambda token: token.replace("-", "_"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.argument("model")
@click.option("--kwargs", metavar="JSON", default="{}", help="Arguments of the class, where MODEL names one.")
@click.option("--num_processes", type=click.IntRange(min=1), default=8, show_default=True, help="That share the work.")
@click.option("--strategy", multiple=True, metavar="NAME", help=f"Default: {', '.join(_STRATEGIES)}.")
@click.option("--precision", multiple=True, metavar="NAME", help="Default: 32, bf16, bf16-true.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam, sgd, sgd_momentum, ...")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[NAME=]SHAPE[:DTYPE]",
    help="A tensor of one process's batch, such as 8x128:int64. With it, activations are estimated too.",
)
@click.option("--dtypes", multiple=True, type=click.Choice(_DTYPES), help="Of inference. Default: all.")
@click.option("--trust_remote_code", is_flag=True, help="Run code that a config.json names. Only where you trust it.")
@click.option("--library_name", type=click.Choice(["transformers", "timm"]), help="Accepted; files say what they are.")
@click.option("--json", "as_json", is_flag=True, help="Print bytes as JSON.")
def estimate_memory(
    model: str,
    kwargs: str,
    num_processes: int,
    strategy: Sequence[str],
    precision: Sequence[str],
    optimizer: str,
    inputs: Sequence[str],
    dtypes: Sequence[str],
    trust_remote_code: bool,
    library_name: str | None,
    as_json: bool,
) -> None:
    """Estimate the memory that MODEL takes in each process, in training and in inference.

    MODEL is package.module:Class, the config.json of a transformers model or its folder, or a safetensors file or
    folder. Nothing is downloaded, and no weights are allocated.

    \b
    drivetrain estimate-memory mypackage.models:GPT --kwargs '{"layers": 12}' --input 8x1024:int64
    drivetrain estimate-memory llama/config.json --num_processes 64 --strategy fsdp
    drivetrain estimate-memory checkpoints/final
    """  # noqa: D301
    sys.path.insert(0, "")  # as python -m does
    from drivetrain.cli.memory_model import estimate_training
    from drivetrain.cli.model_size import ModelSize, read_model, size_of_module

    found = read_model(model, parse_arguments(kwargs), trust_remote_code)
    size = found if isinstance(found, ModelSize) else size_of_module(found)
    precisions = precision or ("32", "bf16", "bf16-true")
    chosen = strategy or _STRATEGIES
    measured = _measured(found, size, inputs, precisions, optimizer)
    training = {
        name: {
            each: estimate_training(size, name, each, num_processes, optimizer, **measured.get(each, {}))
            for each in precisions
        }
        for name in chosen
    }
    inference = _inference(size, dtypes or _DTYPES)
    if as_json:
        plain = {
            name: {each: {**vars(use), "total": use.total} for each, use in row.items()}
            for name, row in training.items()
        }
        click.echo(json.dumps({"model": vars(size), "training": plain, "inference": inference}, indent=2))
        return
    click.echo(f"{model}: {size.parameters:,} parameters, {size.largest_unit:,} in the largest unit\n")
    with_or_without = "with" if measured else "without activations: give --input; with"
    click.echo(f"Training in each of {num_processes} process(es), {with_or_without} {optimizer}")
    _table(
        ["strategy", *precisions],
        [[name, *(as_bytes(use.total) for use in row.values())] for name, row in training.items()],
    )
    click.echo("\nInference, without activations")
    _table(
        ["dtype", "largest unit", "whole"],
        [[name, as_bytes(row["largest_unit"]), as_bytes(row["total"])] for name, row in inference.items()],
    )


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a class, from JSON.

    Raises:
        ConfigurationError: It is no JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"--kwargs {text!r} is no JSON: {error}. Give an object, such as '{{}}'.") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"--kwargs {text!r} must be a JSON object, such as '{{\"width\": 64}}'.")
    return value


def _measured(
    model: nn.Module | ModelSize, size: ModelSize, inputs: Sequence[str], precisions: Sequence[str], optimizer: str
) -> dict[str, dict[str, float]]:
    """What the peaks of a step on one process are above weights, gradients and optimizer state, by precision."""
    from drivetrain.cli.memory_model import estimate_training
    from drivetrain.cli.model_size import ModelSize
    from drivetrain.cli.peak_memory import parse_inputs, peak_of_training

    parsed = parse_inputs(inputs)
    if not inputs:
        return {}
    if isinstance(model, ModelSize):
        raise ConfigurationError("--input needs a model that can run, but safetensors files hold weights alone.")
    found = {}
    for each in precisions:
        kept = estimate_training(size, "single", each, 1, optimizer).total
        of_backward, of_step = peak_of_training(model, parsed, each, _optimizer(optimizer))
        found[each] = {"activations": max(0.0, of_backward - kept), "temporaries": max(0.0, of_step - kept)}
    return found


def _optimizer(name: str) -> Any:
    from functools import partial

    import torch

    known = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    }
    return known.get(name, torch.optim.AdamW)  # an unknown name is refused by the estimate


def _inference(size: ModelSize, dtypes: Sequence[str]) -> dict[str, dict[str, float]]:
    from drivetrain.cli.memory_model import INFERENCE

    return {
        name: {
            "largest_unit": size.largest_unit * INFERENCE[name],
            "total": size.parameters * INFERENCE[name] + size.buffers,
        }
        for name in dtypes
    }


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    for row in [headers, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        click.echo("  " + "   ".join(cells))
