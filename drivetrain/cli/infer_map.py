"""`drivetrain infer-map`: a place for each module of a model, on devices that need not be there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from drivetrain.cli.estimate_memory import parse_arguments
from drivetrain.runtime.byte_sizes import parse_bytes
from drivetrain.runtime.terminal import visible

_NAMES = ("sequential", "auto", "balanced", "balanced_low_0")


@click.command(name="infer-map", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("model")
@click.option("--device", "devices", multiple=True, metavar="SIZE", help="An accelerator's memory, such as 24GB.")
@click.option("--cpu", metavar="SIZE", default="0GB", help="Memory of the CPU. Default: none is used.")
@click.option("--disk", metavar="SIZE", help="Room on the disk. Default: as much as is needed.")
@click.option("--map", "policy", type=click.Choice(_NAMES), default="sequential", show_default=True)
@click.option("--dtype", help="Of the weights as they are loaded, such as bfloat16 or int4.")
@click.option("--no-split", multiple=True, metavar="CLASS", help="Classes kept whole. Default: blocks that repeat.")
@click.option("--offload-buffers", is_flag=True, help="Keep buffers of offloaded modules off the device too.")
@click.option("--kwargs", metavar="JSON", default="{}", help="Arguments of the class, where MODEL names one.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that a config.json names. Only where you trust it.")
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Draw the map on a page.")
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
    """Place the modules of MODEL on accelerators with the given memory, on the CPU and on the disk.

    MODEL is package.module:Class, the config.json of a transformers model or its folder, or a safetensors file or
    folder. Nothing is downloaded, and no weights are allocated.

    \b
    drivetrain infer-map llama/config.json --device 24GB --device 24GB --cpu 64GB --dtype bfloat16
    drivetrain infer-map checkpoints/final --device 8GB --html map.html
    """  # noqa: D301
    sys.path.insert(0, "")  # as python -m does
    from drivetrain.cli.model_size import module_without_memory, read_model
    from drivetrain.inference import infer_auto_device_map

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
