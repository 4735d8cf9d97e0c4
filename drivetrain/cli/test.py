"""`drivetrain test`: trains for a moment on the configured setup, and reports what is wrong with it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from drivetrain.runtime.errors import ConfigurationError

_TRIAL = "drivetrain.cli.trial"
_HANG_SECONDS = "120"

# check -> what to do where it fails
_ADVICE = {
    "start": "The processes did not meet, or the options cannot be. The message above is the first one's. "
    "Between machines, check that the address and port of the first are reachable from the others.",
    "processes": "Check --num_processes, and that no variables of another launcher (RANK, WORLD_SIZE) are set.",
    "devices": "Start one process for each device, and check --gpu_ids and CUDA_VISIBLE_DEVICES.",
    "collectives": "The network between the processes is at fault, or the backend's version differs between machines. "
    "NCCL_DEBUG=INFO or GLOO_SOCKET_IFNAME=<interface> narrows it down.",
    "data": "Check that all machines run the same version of drivetrain.",
    "training": "Run with --mixed_precision no to separate the precision from the strategy, and with "
    "--num_processes 1 to separate both from the device.",
    "weights": "Check that all machines run the same versions of torch and of drivetrain (`drivetrain env`).",
    "checkpoint": "Check that the folder for temporary files (TMPDIR) can be written and has room.",
}


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    options_metavar="[FLAGS]",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="")
def test(flags: tuple[str, ...]) -> int:
    """Train for a moment on the configured setup, and compare with one process.

    FLAGS are those of `drivetrain launch`. Each process checks that it has its rank, device and share of the data,
    that collectives are exact, that losses are those of one process in plain PyTorch, that all end with the same
    model, and that a checkpoint brings it back.

    \b
    drivetrain test
    drivetrain test --num_processes 2 --cpu --mixed_precision bf16
    """  # noqa: D301
    given, is_preview = _settings(flags)
    if is_preview:
        return _launch([*flags, "-m", _TRIAL])
    processes = given.get("num_processes")
    patience: list[str] = []
    if "hang_timeout" not in given and not os.environ.get("DRIVETRAIN_HANG_TIMEOUT"):
        patience = ["--hang_timeout", _HANG_SECONDS]
    with tempfile.TemporaryDirectory(prefix="drivetrain_test_") as folder:
        results = Path(folder) / "results"
        arguments = ["--results", str(results)]
        if processes is not None and processes.value > 0:
            arguments += ["--processes", str(processes.value)]
        code = _launch([*patience, *flags, "-m", _TRIAL, *arguments])
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return _report(lines, code)


def _settings(flags: tuple[str, ...]) -> tuple[dict[str, Any], bool]:
    """The settings that are in force with these flags, and whether they are only to be shown."""
    from drivetrain.cli.launch import launch
    from drivetrain.launch.options import SETTINGS
    from drivetrain.launch.settings.sources import collect

    # A script is what the launcher needs; what it finds before ours is not a flag.
    parsed: dict[str, Any] = launch.make_context("drivetrain test", [*flags, "-m", _TRIAL]).params
    if parsed["script"] != _TRIAL:
        raise ConfigurationError(
            f"drivetrain test takes the flags of drivetrain launch and no script, but got {parsed['script']!r}. "
            "It brings a script of its own.",
        )
    given = {name: value for name, value in parsed.items() if name in SETTINGS and value != ()}
    return collect(given, os.environ, parsed["config_file"]), parsed["dry_run"]


def _launch(arguments: list[str]) -> int:
    from drivetrain.cli.launch import launch

    code = launch.main(args=arguments, prog_name="drivetrain test", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _report(lines: list[dict[str, Any]], code: int) -> int:
    """Print what was found; the command's exit code."""
    began = [line["began"] for line in lines if "began" in line]
    findings = [line["finding"] for line in lines if "finding" in line]
    for finding in findings:
        click.echo(f"  {'ok   ' if finding['ok'] else 'WRONG'}  {finding['name']:<12} {finding['text']}")
    wrong = [finding["name"] for finding in findings if not finding["ok"]]
    if not wrong and code:
        wrong = [began[-1] if began else "start"]
        click.echo(f"  WRONG  {wrong[0]:<12} the processes ended here, with exit code {code}")
    if wrong:
        click.echo(f"\nThis setup does not train as it must. {_ADVICE[wrong[0]]}")
        return code or 1
    click.echo("\nThis setup trains, and agrees with one process.")
    return 0
