"""What the commands that write a file for a scheduler have in common."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _split(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(shlex.split(value))


def batch_command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function: its script, the script's arguments, and where the file goes."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        function = click.argument("args", nargs=-1, type=click.UNPROCESSED)(function)
        function = click.argument("script")(function)
        function = click.option(
            "--launch_flags", "flags", default="", metavar="FLAGS", callback=_split, help="Further flags of launch."
        )(function)
        function = click.option(
            "--file", type=click.Path(dir_okay=False, path_type=Path), help="Where to write. Default: stdout."
        )(function)
        settings = {
            "allow_interspersed_args": False,  # everything after the script belongs to the script
            "token_normalize_func": lambda token: token.replace("-", "_"),
            "max_content_width": 110,
        }
        return click.command(name, context_settings=settings, options_metavar="[FLAGS]")(function)

    return decorate


def write_batch(text: str, file: Path | None) -> None:
    """Write a batch file where the user asked for it."""
    if file is None:
        click.echo(text, nl=False)
    else:
        file.write_text(text)
        click.echo(f"{file} is written.", err=True)
