"""The `estimate-memory` and `infer-map` commands: memory of a model that need not fit on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import as_bytes, parse_bytes
from drivetrain.runtime.terminal import visible

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.inference import DeviceMap
    from drivetrain.inference.model_size import ModelSize


_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4", "nf4", "nf4_double")
_STRATEGIES = ("ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "tp", "cp", "pp")


class EstimateCommand(click.Command):
    """Click command whose options accept several values, as in `--dtypes int8 int4`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
@click.option("--kwargs", metavar="JSON", default="{}", help="Arguments of the class, if MODEL is a class.")
@click.option("--num_processes", type=click.IntRange(min=1), default=8, show_default=True, help="World size.")
@click.option("--strategy", multiple=True, metavar="NAME", help=f"Strategies. Default: {', '.join(_STRATEGIES)}.")
@click.option("--precision", multiple=True, metavar="NAME", help="Precisions. Default: 32, bf16, bf16-true.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam, sgd, sgd_momentum, ...")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[NAME=]SHAPE[:DTYPE]",
    help="Shape of an input of one process, such as 8x128:int64. Needed to estimate activations.",
)
@click.option("--dtypes", multiple=True, type=click.Choice(_DTYPES), help="Weight dtypes of inference. Default: all.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Batch size of the KV cache.")
@click.option("--seq", type=click.IntRange(min=1), help="Sequence length of the KV cache. MODEL must be a config.json.")
@click.option("--device", "devices", multiple=True, metavar="SIZE", help="Memory of an accelerator, such as 24GB.")
@click.option("--cpu", metavar="SIZE", default="0GB", help="CPU memory for the device map.")
@click.option("--trust_remote_code", is_flag=True, help="Run code that the config.json names. Only for trusted files.")
@click.option("--library_name", type=click.Choice(["transformers", "timm"]), help="Accepted and ignored.")
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
    batch: int,
    seq: int | None,
    devices: Sequence[str],
    cpu: str,
    trust_remote_code: bool,
    library_name: str | None,
    as_json: bool,
) -> None:
    """Estimate the memory of a model in each process, in training and inference.

    MODEL is package.module:Class, the config.json of a transformers model or its folder, or a safetensors file or
    folder. Nothing is downloaded, and no weights are allocated.

    
    drivetrain estimate-memory mypackage.models:GPT --kwargs '{"layers": 12}' --input 8x1024:int64
    drivetrain estimate-memory llama/config.json --num_processes 64 --strategy fsdp
    drivetrain estimate-memory checkpoints/final
    """
    sys.path.insert(0, "")  # as python -m does
    from drivetrain.inference.model_size import ModelSize, estimate_training, read_model, size_of_module

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
    inference = _inference(size, dtypes or _DTYPES, _cached_values(model, batch, seq))
    maps = _maps(model, found, devices, cpu, dtypes or _DTYPES)
    if as_json:
        plain = {
            name: {each: {**vars(use), "total": use.total} for each, use in row.items()}
            for name, row in training.items()
        }
        counts = {name: value for name, value in vars(size).items() if name != "units"}
        placed = {"device_maps": {name: found.to_dict() for name, found in maps.items()}} if maps else {}
        click.echo(json.dumps({"model": counts, "training": plain, "inference": inference, **placed}, indent=2))
        return
    click.echo(visible(f"{model}: {size.parameters:,} parameters, {size.largest_unit:,} in the largest unit\n"))
    with_or_without = "with" if measured else "without activations: give --input; with"
    click.echo(f"Training in each of {num_processes} process(es), {with_or_without} {optimizer}")
    _table(
        ["strategy", *precisions],
        [[name, *(as_bytes(use.total) for use in row.values())] for name, row in training.items()],
    )
    _print_inference(inference, batch, seq)
    for name, placed in maps.items():
        click.echo(visible(f"\nDevice map, {name}\n{placed}"))


def _print_inference(inference: Mapping[str, Mapping[str, float]], batch: int, seq: int | None) -> None:
    cache = "" if seq is None else f", with the KV cache of {batch} x {seq} positions"
    click.echo(f"\nInference, without activations{cache}")
    columns = ["largest_unit", "streamed", "total"] + (["kv_cache", "with_kv_cache"] if seq else [])
    _table(
        ["dtype", "largest unit", "streamed", "whole"] + (["KV cache", "whole with it"] if seq else []),
        [[name, *(as_bytes(row[column]) for column in columns)] for name, row in inference.items()],
    )
    click.echo("  streamed: two of the largest units, one in use while the next is copied")


def _cached_values(model: str, batch: int, seq: int | None) -> int:
    if seq is None:
        return 0
    from drivetrain.inference.model_size import kv_cache_values, read_config

    return kv_cache_values(read_config(model), batch, seq)


def _maps(
    source: str, model: nn.Module | ModelSize, devices: Sequence[str], cpu: str, dtypes: Sequence[str]
) -> dict[str, DeviceMap]:
    if not devices:
        return {}
    from drivetrain.inference import infer_auto_device_map
    from drivetrain.inference.model_size import matrices_of, module_without_memory

    memory: dict[int | str, int | str] = {**dict(enumerate(devices)), "cpu": cpu}
    placed = module_without_memory(source, model)
    found = {}
    for name in dtypes:
        four_bits = name.startswith("nf4")
        special = dict.fromkeys(matrices_of(placed), "int5") if four_bits else None  # 4 bits and the scales
        dtype = "bfloat16" if four_bits else name
        found[name] = infer_auto_device_map(placed, memory, dtype=dtype, special_dtypes=special)
    return found


def parse_arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"--kwargs {text!r} is not JSON: {error}. Pass an object such as '{{}}'.") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"--kwargs {text!r} must be a JSON object, such as '{{\"width\": 64}}'.")
    return value


def _measured(
    model: nn.Module | ModelSize, size: ModelSize, inputs: Sequence[str], precisions: Sequence[str], optimizer: str
) -> dict[str, dict[str, float]]:
    from drivetrain.inference.model_size import ModelSize, estimate_training, parse_inputs, peak_of_training

    parsed = parse_inputs(inputs)
    if not inputs:
        return {}
    if isinstance(model, ModelSize):
        raise ConfigurationError("--input needs a model with code. Safetensors files contain weights only.")
    found = {}
    for each in precisions:
        # What exceeds weights, gradients and optimizer state are activations or temporary tensors.
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
    return known.get(name, torch.optim.AdamW)  # estimate_training raises for unknown names


def _inference(size: ModelSize, dtypes: Sequence[str], cached: int) -> dict[str, dict[str, float]]:
    from drivetrain.inference.model_size import INFERENCE

    found = {}
    for name in dtypes:
        of_matrices, of_others = INFERENCE[name]
        units = [matrices * of_matrices + (count - matrices) * of_others for count, matrices in size.units]
        largest, total = max(units, default=0.0), sum(units) + size.buffers
        row = {"largest_unit": largest, "streamed": 2 * largest + size.buffers, "total": total}
        if cached:
            cache = cached * (4.0 if name == "float32" else 2.0)
            row |= {"kv_cache": cache, "with_kv_cache": total + cache}
        found[name] = row
    return found


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    for row in [headers, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        click.echo(visible("  " + "   ".join(cells)))


# The infer-map command


_POLICIES = ("sequential", "auto", "balanced", "balanced_low_0")


@click.command(name="infer-map", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("model")
@click.option("--device", "devices", multiple=True, metavar="SIZE", help="An accelerator's memory, such as 24GB.")
@click.option("--cpu", metavar="SIZE", default="0GB", help="CPU memory. Default: none.")
@click.option("--disk", metavar="SIZE", help="Disk space. Default: unlimited.")
@click.option("--map", "policy", type=click.Choice(_POLICIES), default="sequential", show_default=True)
@click.option("--dtype", help="Dtype of the loaded weights, such as bfloat16 or int4.")
@click.option("--no-split", multiple=True, metavar="CLASS", help="Classes to keep whole. Default: repeated blocks.")
@click.option("--offload-buffers", is_flag=True, help="Offload the buffers of offloaded modules too.")
@click.option("--kwargs", metavar="JSON", default="{}", help="Arguments of the class, if MODEL is a class.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the config.json names. Only for trusted files.")
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print the map as JSON.")
def infer_map(
    model: str,
    devices: Sequence[str],
    cpu: str,
    disk: str | None,
    policy: str,
    dtype: str | None,
    no_split: Sequence[str],
    offload_buffers: bool,
    kwargs: str,
    trust_remote_code: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Assign the modules of a model to accelerators, the CPU and the disk.

    MODEL is package.module:Class, the config.json of a transformers model or its folder, or a safetensors file or
    folder. Nothing is downloaded, and no weights are allocated.

    
    drivetrain infer-map llama/config.json --device 24GB --device 24GB --cpu 64GB --dtype bfloat16
    drivetrain infer-map checkpoints/final --device 8GB --html map.html
    """
    sys.path.insert(0, "")  # as python -m does
    from drivetrain.inference import infer_auto_device_map
    from drivetrain.inference.model_size import module_without_memory, read_model

    memory: dict[int | str, int] = {index: parse_bytes(size) for index, size in enumerate(devices)}
    memory["cpu"] = parse_bytes(cpu)
    if disk is not None:
        memory["disk"] = parse_bytes(disk)
    found = infer_auto_device_map(
        module_without_memory(model, read_model(model, parse_arguments(kwargs), trust_remote_code)),
        memory,
        list(no_split) or None,
        dtype,
        offload_buffers=offload_buffers,
        policy=policy,
    )
    if html is not None:
        html.write_text(found.html(), encoding="utf-8")
    click.echo(visible(json.dumps(found.to_dict(), indent=2) if as_json else str(found)))
