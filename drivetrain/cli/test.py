"""The `test` command: check the configured setup with a short training run."""

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

# check -> advice if it fails
_ADVICE = {
    "start": "The processes could not connect, or the options are invalid. The message above is from the first process "
    "that failed. With several machines, check that the others can reach the address and port of the first.",
    "processes": "Check --num_processes, and that no variables of another launcher (RANK, WORLD_SIZE) are set.",
    "devices": "Start one process for each device, and check --gpu_ids and CUDA_VISIBLE_DEVICES.",
    "collectives": "The network between the processes fails, or the backend's version differs between machines. "
    "Set NCCL_DEBUG=INFO or GLOO_SOCKET_IFNAME=<interface> to find the cause.",
    "data": "Check that all machines run the same version of drivetrain.",
    "training": "Run with --mixed_precision no to separate the precision from the strategy, and with "
    "--num_processes 1 to separate both from the device.",
    "weights": "Check that all machines run the same versions of torch and of drivetrain (`drivetrain env`).",
    "checkpoint": "Check that the folder for temporary files (TMPDIR) is writable and has free space.",
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
    """Test the launch configuration: train briefly with it, and compare the results with those of one process.

    FLAGS are those of `drivetrain launch`. The checks cover ranks, devices, exact collectives and data sharding. Losses
    must equal those of one process in plain PyTorch, all processes must end with equal models, and a checkpoint must
    restore the model.

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
    from drivetrain.cli.launch import launch
    from drivetrain.launch.options import SETTINGS
    from drivetrain.launch.settings.sources import collect

    # The launcher's parser needs a script. If it finds another one before ours, the user has given a script.
    parsed: dict[str, Any] = launch.make_context("drivetrain test", [*flags, "-m", _TRIAL]).params
    if parsed["script"] != _TRIAL:
        raise ConfigurationError(
            f"drivetrain test runs a built-in script, and not {parsed['script']!r}. Pass only flags of "
            "drivetrain launch.",
        )
    given = {name: value for name, value in parsed.items() if name in SETTINGS and value != ()}
    return collect(given, os.environ, parsed["config_file"]), parsed["dry_run"]


def _launch(arguments: list[str]) -> int:
    from drivetrain.cli.launch import launch

    code = launch.main(args=arguments, prog_name="drivetrain test", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _report(lines: list[dict[str, Any]], code: int) -> int:
    began = [line["began"] for line in lines if "began" in line]
    findings = [line["finding"] for line in lines if "finding" in line]
    for finding in findings:
        click.echo(f"  {'ok   ' if finding['ok'] else 'WRONG'}  {finding['name']:<12} {finding['text']}")
    wrong = [finding["name"] for finding in findings if not finding["ok"]]
    if not wrong and code:
        wrong = [began[-1] if began else "start"]
        click.echo(f"  WRONG  {wrong[0]:<12} the processes ended during this check with exit code {code}")
    if wrong:
        click.echo(f"\nThis setup does not train correctly. {_ADVICE[wrong[0]]}")
        return code or 1
    click.echo("\nThis setup trains correctly and agrees with a single process.")
    return 0
