"""The `env` command: versions, devices and settings for a bug report, with secrets hidden."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from drivetrain.runtime.terminal import visible

_PACKAGES = (
    "torch",
    "torchmetrics",
    "numpy",
    "safetensors",
    "accelerate",
    "transformers",
    "tensorboard",
    "deepspeed",
    "torchao",
    "bitsandbytes",
)
_SETTINGS = {
    "DRIVETRAIN_USE_CPU": "run on the CPU",
    "DRIVETRAIN_MIXED_PRECISION": "default precision",
    "DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "default micro-batches per optimizer step",
    "DRIVETRAIN_DEBUG": "compare the calls of all processes before each collective",
    "DRIVETRAIN_FULL_TRACEBACK": "show all frames of tracebacks",
    "DRIVETRAIN_HANG_TIMEOUT": "seconds without progress that count as a hang",
    "OMP_NUM_THREADS": "threads of each process",
    "CUDA_VISIBLE_DEVICES": "accelerators that torch may use",
}
# Variables of torch and of other launchers that affect a run.
_OTHERS = re.compile(
    r"^(DRIVETRAIN|ACCELERATE|FSDP|DEEPSPEED|MEGATRON|PARALLELISM_CONFIG|NCCL|TORCH|GLOO|PYTORCH|SLURM|OMPI|PJRT|XLA)_"
    r"|^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|HF_HOME)$"
)


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("-", "_")})
@click.option("--config_file", type=click.Path(), help="Configuration file to show. Default: the user's own.")
def env(config_file: str | None) -> None:
    """Show the versions, devices and settings that drivetrain uses, and where each setting comes from.

    Keys, tokens and passwords are hidden, and the home directory is shown as `~`, so that you can share the report.
    """
    from drivetrain.trackers.secrets import Secrets, is_secret_name

    secrets = Secrets()
    home = str(Path.home())
    title = ""
    for section, name, value in _report(config_file):
        if section != title:
            click.echo(f"{chr(10) if title else ''}{section}")
            title = section
        shown = "<hidden>" if is_secret_name(name) else secrets.in_text(value)
        if len(home) > 1:
            shown = re.sub(rf"{re.escape(home)}(?=/|$|\s|:)", "~", shown)
        click.echo(visible(f"  {name:<40}{shown}"))
    click.echo("\nArguments in the script override flags of the launcher, and flags override the environment.")


def _report(config_file: str | None) -> Iterator[tuple[str, str, str]]:
    yield from _versions()
    yield from _devices()
    yield from _process()
    yield from _settings()
    yield from _configuration(config_file)


def _versions() -> Iterator[tuple[str, str, str]]:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    import drivetrain

    yield "Versions", "drivetrain", f"{drivetrain.__version__} ({Path(drivetrain.__file__).parent})"
    yield "Versions", "python", f"{platform.python_version()} ({sys.executable})"
    yield "Versions", "system", platform.platform()
    for package in _PACKAGES:
        try:
            yield "Versions", package, version(package)
        except PackageNotFoundError:
            yield "Versions", package, "not installed"


def _devices() -> Iterator[tuple[str, str, str]]:
    import psutil

    from drivetrain.runtime.devices import available_device_kinds

    for kind in available_device_kinds():
        count = f"{os.cpu_count()} cores" if kind.name == "cpu" else f"{kind.count()} device(s)"
        yield "Devices", kind.name, f"{count}, process groups over {kind.backend}"
    yield "Devices", "memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"


def _process() -> Iterator[tuple[str, str, str]]:
    from drivetrain.runtime.environment import ProcessEnvironment
    from drivetrain.runtime.errors import ConfigurationError

    try:
        place = ProcessEnvironment.detect()
        yield "Process", "rank", f"{place.rank} of {place.world_size} (from {place.source})"
    except ConfigurationError as error:
        yield "Process", "rank", error.message


def _settings() -> Iterator[tuple[str, str, str]]:
    for name, meaning in _SETTINGS.items():
        given = os.environ.get(name)
        yield "Settings", name, f"{given}  (environment)" if given is not None else f"not set  ({meaning})"
    for name in sorted(name for name in os.environ if _OTHERS.search(name) and name not in _SETTINGS):
        yield "Settings", name, f"{os.environ[name]}  (environment)"


def _configuration(named: str | None) -> Iterator[tuple[str, str, str]]:
    import yaml

    from drivetrain.launch.settings.sources import find_config_file
    from drivetrain.runtime.errors import ConfigurationError
    from drivetrain.runtime.yaml_text import load_yaml

    file = find_config_file(named, os.environ)
    if file is None:
        return
    try:
        content = load_yaml(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"Configuration file {str(file)!r} cannot be read: {error}") from error
    for name, value in _flattened(content):
        yield "Configuration file", name, value
    yield "Configuration file", "read from", str(file)


def _flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flattened(each, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix or "all", str(value)
