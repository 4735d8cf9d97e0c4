"""Shared parts of the commands that write a scheduler's batch file."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _split(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(shlex.split(value))


def batch_command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that turns a function into the click command `name`, which writes a cluster's batch file.

    Args:
        name: The name of the command.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        function = click.argument("args", nargs=-1, type=click.UNPROCESSED)(function)
        function = click.argument("script")(function)
        function = click.option(
            "--launch_flags", "flags", default="", metavar="FLAGS", callback=_split, help="Flags of drivetrain launch."
        )(function)
        output = click.Path(dir_okay=False, path_type=Path)
        function = click.option("--file", type=output, help="Output file. Default: stdout.")(function)
        settings = {
            "allow_interspersed_args": False,  # arguments after the script belong to the script
            "token_normalize_func": lambda token: token.replace("-", "_"),
            "max_content_width": 110,
        }
        return click.command(name, context_settings=settings, options_metavar="[FLAGS]")(function)

    return decorate


def write_batch(text: str, file: Path | None) -> None:
    if file is None:
        click.echo(text, nl=False)
    else:
        file.write_text(text)
        click.echo(f"Wrote {file}.", err=True)
