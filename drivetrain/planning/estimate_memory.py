"""The `estimate-memory` command: memory of a model that need not fit on this machine, in training and inference."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.host import as_bytes
from drivetrain.runtime.terminal import visible

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.inference import DeviceMap
    from drivetrain.inference.model_size import ModelSize
    from drivetrain.planning.planner import Plan


_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4", "nf4", "nf4_double")
_PRECISIONS = {"32": 4, "bf16": 4, "fp16": 4, "bf16-true": 2, "fp16-true": 2, "64": 8, "fp8": 4}
"""Bytes of a weight, of a gradient and of each value of optimizer state, by precision."""
_MOMENTS = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd_momentum": 1, "sgd": 0}
"""Values of optimizer state for each parameter, by optimizer."""


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
@click.option("--strategy", multiple=True, metavar="NAME", help="Strategies, as `drivetrain plan` names them.")
@click.option("--precision", multiple=True, metavar="NAME", help="Precisions. Default: 32, bf16, bf16-true.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam, sgd, sgd_momentum, ...")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[NAME=]SHAPE[:DTYPE]",
    help="Shape of an input of one process, such as 8x128:int64. A step of training then runs without memory.",
)
@click.option("--dtypes", multiple=True, type=click.Choice(_DTYPES), help="Weight dtypes of inference. Default: all.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Rows, for --seq.")
@click.option("--seq", type=click.IntRange(min=1), help="Tokens of a sequence, for a config.json.")
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

    \b
    drivetrain estimate-memory mypackage.models:GPT --kwargs '{"layers": 12}' --input 8x1024:int64
    drivetrain estimate-memory llama/config.json --num_processes 64 --strategy fsdp
    drivetrain estimate-memory checkpoints/final
    """  # noqa: D301
    sys.path.insert(0, "")  # as python -m does
    from drivetrain.inference.model_size import ModelSize, parse_arguments, read_model, size_of_module
    from drivetrain.planning.candidates import DEFAULT
    from drivetrain.planning.command import Bar
    from drivetrain.planning.hardware import Cluster, Device
    from drivetrain.planning.planner import plan

    arguments = parse_arguments(kwargs)
    found = read_model(model, arguments, trust_remote_code)
    size = found if isinstance(found, ModelSize) else size_of_module(found)
    precisions = precision or ("32", "bf16", "bf16-true")
    _require("precision", precisions, _PRECISIONS)
    _require("optimizer", [optimizer], _MOMENTS)
    states = {each: _states(size, each, optimizer) for each in precisions}
    made = None
    if inputs or seq or strategy:
        if isinstance(found, ModelSize):
            raise ConfigurationError("--input, --seq and --strategy need a model with code, not only its weights.")
        device = Device("any", math.inf, {"float32": 1.0}, 1.0, 1.0, 1.0)  # memory is the question, not speed
        made = plan(
            model,
            Cluster(device, num_processes),
            kwargs=arguments,
            inputs=inputs,
            seq=seq,
            batch=batch if seq else None,
            strategies=[each.replace("deepspeed_stage_", "deepspeed:") for each in strategy] or DEFAULT,
            precisions=precisions,
            recompute=(False,),
            optimizer=optimizer,
            trust_remote_code=trust_remote_code,
            progress=Bar() if sys.stderr.isatty() and not as_json else None,
        )
    inference = _inference(size, dtypes or _DTYPES, _cached_values(model, batch, seq))
    maps = _maps(model, found, devices, cpu, dtypes or _DTYPES)
    if as_json:
        counts = {name: value for name, value in vars(size).items() if name != "units"}
        planned = {"training": _as_dicts(made), "refused": dict(made.refused)} if made else {}
        placed = {"device_maps": {name: found.to_dict() for name, found in maps.items()}} if maps else {}
        everything = {"model": counts, "states": states, **planned, "inference": inference, **placed}
        click.echo(json.dumps(everything, indent=2))
        return
    click.echo(visible(f"{model}: {size.parameters:,} parameters, {size.largest_unit:,} in the largest unit\n"))
    if made is None:
        click.echo(
            f"Training with {optimizer}: weights, gradients and optimizer state. For the whole step, give --input."
        )
        _table(
            ["precision", "whole", f"in each of {num_processes}, if sharded"],
            [[name, as_bytes(count), as_bytes(count / num_processes)] for name, count in states.items()],
        )
    else:
        click.echo(f"Training in each of {num_processes} process(es), with {optimizer}: peak of a step")
        _table(["strategy", *precisions], _peaks(made, precisions))
        failed = {each.candidate.way: each.error for each in made.results if each.error}
        for name, reason in {**made.refused, **failed}.items():
            click.echo(visible(f"  {name}: {reason.removesuffix('.')}."))
    _print_inference(inference, batch, seq)
    for name, placed in maps.items():
        click.echo(visible(f"\nDevice map, {name}\n{placed}"))


def _require(what: str, given: Sequence[str], allowed: Mapping[str, object]) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigurationError(
                f"{what} is {name!r}, but must be one of {', '.join(allowed)}.{nearest(name, allowed)}"
            )


def _states(size: ModelSize, precision: str, optimizer: str) -> int:
    trained = size.trainable * (1 + _MOMENTS[optimizer])
    return _PRECISIONS[precision] * (size.parameters + trained) + size.buffers


def _as_dicts(made: Plan) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in made.results:
        row: dict[str, Any] = {"error": result.error}
        if result.estimate is not None:
            kinds = {kind: round(size) for kind, size in result.estimate.kinds.items()}
            row = {**kinds, "total": round(result.estimate.peak)}
        found.setdefault(result.candidate.way, {})[result.candidate.precision] = row
    return found


def _peaks(made: Plan, precisions: Sequence[str]) -> list[list[str]]:
    rows: dict[str, list[str]] = {}
    for precision in precisions:
        for result in made.results:
            if result.candidate.precision == precision:
                peak = as_bytes(result.estimate.peak) if result.estimate is not None else "failed"
                rows.setdefault(result.candidate.way, []).append(peak)
    return [[name, *peaks] for name, peaks in rows.items()]


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
