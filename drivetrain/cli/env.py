"""`drivetrain env`: what to put into a bug report, and where settings come from."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import click

_PACKAGES = (
    "torch",
    "torchmetrics",
    "numpy",
    "safetensors",
    "tensorboard",
    "deepspeed",
    "torchao",
    "bitsandbytes",
)
_SETTINGS = {
    "DRIVETRAIN_USE_CPU": "run on the CPU",
    "DRIVETRAIN_MIXED_PRECISION": "default number format",
    "DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "default micro-batches in a step",
    "DRIVETRAIN_DEBUG": "processes compare their calls before each collective",
    "DRIVETRAIN_HANG_TIMEOUT": "seconds without progress that are a hang",
    "OMP_NUM_THREADS": "threads of each process",
    "CUDA_VISIBLE_DEVICES": "accelerators that torch may see",
}


@click.command()
def env() -> None:
    """Show versions, devices and settings, and where each setting came from."""
    import drivetrain
    from drivetrain.runtime.devices import available_device_kinds
    from drivetrain.runtime.environment import ProcessEnvironment
    from drivetrain.runtime.errors import ConfigurationError

    _section("Versions")
    _row("drivetrain", drivetrain.__version__)
    _row("python", f"{platform.python_version()} ({sys.executable})")
    _row("system", platform.platform())
    for package in _PACKAGES:
        try:
            _row(package, version(package))
        except PackageNotFoundError:
            _row(package, "not installed")

    _section("Devices")
    for kind in available_device_kinds():
        count = f"{os.cpu_count()} cores" if kind.name == "cpu" else f"{kind.count()} device(s)"
        _row(kind.name, f"{count}, process groups over {kind.backend}")

    _section("Process")
    try:
        place = ProcessEnvironment.detect()
        _row("rank", f"{place.rank} of {place.world_size} (from {place.source})")
    except ConfigurationError as error:
        _row("rank", str(error))

    _section("Settings")
    for name, meaning in _SETTINGS.items():
        given = os.environ.get(name)
        _row(name, f"{given}  (environment)" if given is not None else f"not set  ({meaning})")
    unknown = sorted(name for name in os.environ if name.startswith("DRIVETRAIN_") and name not in _SETTINGS)
    for name in unknown:
        _row(name, f"{os.environ[name]}  (environment)")
    click.echo("\nAn argument in the script wins over the launcher's flag, and a flag over the environment.")


def _section(title: str) -> None:
    click.echo(f"\n{title}" if title != "Versions" else title)


def _row(name: str, value: str) -> None:
    click.echo(f"  {name:<40}{value}")
