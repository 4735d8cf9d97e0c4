"""The `launch` command and its flags."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from drivetrain.launch.options import SETTINGS, LaunchOptions
from drivetrain.launch.settings.sources import collect
from drivetrain.runtime.terminal import visible

_TYPES = {"int": int, "float": float}


class LaunchCommand(click.Command):
    """Command whose `--help` shows its flags in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(section_of(str(parameter.name)), []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def section_of(name: str) -> str:
    if name in SETTINGS:
        return SETTINGS[name].section
    return "Configuration" if name in ("config_file", "dry_run") else "Other"


def add_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a click command so that it accepts each launch setting, such as `--num_processes`, as a flag."""
    for setting in reversed(SETTINGS.values()):
        names = [setting.name, *(flag for flag in setting.flags if len(flag) == 2)]
        names += [f"--{setting.name}", *(flag for flag in setting.flags if len(flag) > 2)]
        if setting.kind == "switch":
            command = click.option(*names, is_flag=True, flag_value=True, default=None, help=setting.help)(command)
            continue
        command = click.option(
            *names,
            # Click reports invalid numbers with the flag's name. The setting checks all other values.
            type=str if setting.auto else _TYPES.get(setting.kind, str),
            metavar=setting.metavar or {"bool": "BOOL", "choice": "NAME", "words": "NAMES"}.get(setting.kind),
            multiple=setting.kind == "words",
            default=None,
            help=setting.help,
        )(command)
    return command


@click.command(
    cls=LaunchCommand,
    context_settings={
        "allow_interspersed_args": False,  # arguments after the script belong to the script
        "token_normalize_func": lambda token: token.replace("-", "_"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    options_metavar="[FLAGS]",
)
@click.option(
    "--config_file",
    metavar="FILE",
    help="YAML file of `drivetrain config` or `accelerate config`. Default: the user's own, if it exists.",
)
@click.option(
    "--dry_run",
    is_flag=True,
    help="Show processes, devices, environment and the source of each value, without starting anything.",
)
@add_settings
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(script: str, args: tuple[str, ...], config_file: str | None, dry_run: bool, **flags: Any) -> int:
    """Run SCRIPT with ARGS on several processes.

    Flags go before SCRIPT. Everything after SCRIPT belongs to the script. The first process that fails stops the
    others. Its traceback is shown once, and its exit code becomes the exit code of this command.

    \b
    drivetrain launch train.py --lr 0.1
    drivetrain launch --num_processes 2 --cpu train.py --lr 0.1
    drivetrain launch --config_file fsdp.yaml --dry_run train.py
    drivetrain launch --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.py
    """  # noqa: D301
    flags = {name: value for name, value in flags.items() if value != ()}
    job = {}
    if "SLURM_JOB_ID" in os.environ:
        from drivetrain.launch.slurm import slurm_options

        job = slurm_options(flags)
    given = collect(flags, os.environ, config_file, job)
    options = LaunchOptions.from_given(given)
    options.check_script(script)  # before torch is imported, so that a mistyped name is reported at once
    if dry_run:
        from drivetrain.launch.launcher import preview

        click.echo(visible(preview(options, given, script, args)))
        return 0
    from drivetrain.launch.launcher import launch_script

    return launch_script(options, script, args)
