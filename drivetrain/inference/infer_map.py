"""The `infer-map` command: modules of a model that need not fit on this machine, assigned to devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from drivetrain.runtime.host import parse_bytes
from drivetrain.runtime.terminal import visible

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
    """Assign the modules of a model to accelerators, the CPU and the disk, given the memory of each of them.

    MODEL is package.module:Class, the config.json of a transformers model or its folder, or a safetensors file or
    folder. Nothing is downloaded, and no weights are allocated.

    \b
    drivetrain infer-map llama/config.json --device 24GB --device 24GB --cpu 64GB --dtype bfloat16
    drivetrain infer-map checkpoints/final --device 8GB --html map.html
    """  # noqa: D301
    sys.path.insert(0, "")  # as python -m does
    from drivetrain.inference import infer_auto_device_map
    from drivetrain.inference.model_size import module_without_memory, parse_arguments, read_model

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
