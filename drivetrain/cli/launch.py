"""`drivetrain launch`: the launcher's flags, under Accelerate's names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from drivetrain.launch.settings.setting import Setting
from drivetrain.launch.settings.table import SETTINGS
from drivetrain.runtime.terminal import visible

_TYPES = {"int": int, "float": float}


def _spelling(token: str) -> str:
    """Let `--num-processes` mean `--num_processes`."""
    return token.replace("-", "_")


class LaunchCommand(click.Command):
    """The command, with its flags in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by what they are about."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                section = parameter.section if isinstance(parameter, LaunchOption) else "Other"
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


class LaunchOption(click.Option):
    """A flag; None unless given, so that other sources of options can speak where it is not."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def option_of(setting: Setting) -> LaunchOption:
    """The flag of a setting."""
    names = [setting.name, *(flag for flag in setting.flags if len(flag) == 2)]
    names += [f"--{setting.name}", *(flag for flag in setting.flags if len(flag) > 2)]
    shown: dict[str, Any] = {"help": setting.help, "section": setting.section, "default": None}
    if setting.kind == "switch":
        return LaunchOption(names, is_flag=True, flag_value=True, **shown)
    metavar = setting.metavar or {"bool": "BOOL", "choice": "NAME", "words": "NAMES"}.get(setting.kind)
    # Numbers are checked by click, which explains its own flags; all else by the setting.
    kind = str if setting.auto else _TYPES.get(setting.kind, str)
    return LaunchOption(names, type=kind, metavar=metavar, multiple=setting.kind == "words", **shown)


def add_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flag of each setting to a command."""
    command.__click_params__ = [  # type: ignore[attr-defined]
        *getattr(command, "__click_params__", []),
        *(option_of(setting) for setting in reversed(SETTINGS.values())),
    ]
    return command


@click.command(
    cls=LaunchCommand,
    context_settings={
        "allow_interspersed_args": False,  # everything after the script belongs to the script
        "token_normalize_func": _spelling,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    options_metavar="[FLAGS]",
)
@click.option(
    "--config_file",
    metavar="FILE",
    cls=LaunchOption,
    section="Configuration",
    help="YAML that `drivetrain config` or `accelerate config` has written. Default: the user's own, if it is there.",
)
@click.option(
    "--dry_run",
    is_flag=True,
    cls=LaunchOption,
    section="Configuration",
    help="Show processes, devices, environment and where each value comes from, and start nothing.",
)
@add_settings
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(script: str, args: tuple[str, ...], config_file: str | None, dry_run: bool, **flags: Any) -> int:
    """Run SCRIPT with ARGS on several processes.

    Flags go before SCRIPT; everything after it belongs to the script, untouched. The first process that
    fails stops the others, its traceback is shown once, and its exit code is this command's.

    \b
    drivetrain launch train.py --lr 0.1
    drivetrain launch --num_processes 2 --cpu train.py --lr 0.1
    drivetrain launch --config_file fsdp.yaml --dry_run train.py
    drivetrain launch --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.py
    """  # noqa: D301
    from drivetrain.launch.options import LaunchOptions  # here, so that the help needs the table of settings alone
    from drivetrain.launch.settings.sources import collect
    from drivetrain.launch.slurm import slurm_options

    flags = {name: value for name, value in flags.items() if value != ()}
    given = collect(flags, os.environ, config_file, slurm_options(flags))
    options = LaunchOptions.from_given(given)
    options.check_script(script)  # a mistyped name needs no second of importing torch
    if dry_run:
        from drivetrain.launch.launcher import preview

        click.echo(visible(preview(options, given, script, args)))
        return 0
    if options.mpirun_config:
        from drivetrain.launch.slurm import launch_with_mpi

        return launch_with_mpi(options, script, args)
    if options.launcher == "ray":
        from drivetrain.launch.ray_launcher import launch_with_ray

        return launch_with_ray(options, script, args)
    from drivetrain.launch.agent import require_posix
    from drivetrain.launch.preload import Preloader

    require_posix()
    with Preloader.start(options, script, args) as preloader:  # it imports torch while this process does
        from drivetrain.launch.launcher import launch_script

        return launch_script(options, script, args, preloader)
