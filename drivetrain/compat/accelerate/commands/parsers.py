"""Run drivetrain's commands under Accelerate's names, each with an `argparse` parser."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping
from typing import Any

import click

from drivetrain.runtime.errors import ConfigurationError

HYPHENS = "Flags may be written with hyphens too, such as --num-processes."


def parser_of(
    command: click.Command, name: str, subparsers: Any = None, names: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    """Create an `argparse` parser that accepts the arguments of one of drivetrain's commands.

    Args:
        command: The command.
        name: Its name after `accelerate`.
        subparsers: The group of subcommands to add the parser to. None creates a parser of its own.
        names: Accelerate's name of an argument by drivetrain's name, where the two differ.
    """
    text = f"{command.get_short_help_str(200)} {HYPHENS}"
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser(f"accelerate {name}", description=text, allow_abbrev=False)
        if subparsers is None
        else subparsers.add_parser(name, description=text, allow_abbrev=False)
    )
    several = {"action": "extend", "nargs": "+"}
    if any(isinstance(each, click.Argument) and each.nargs == -1 for each in command.params):
        several = {}  # a flag with several values would take the script's name too
    for each in command.params:
        target = (names or {}).get(str(each.name), str(each.name))
        if isinstance(each, click.Option):
            _add_option(parser, each, target, several)
        else:
            parser.add_argument(target, nargs=argparse.REMAINDER if each.nargs == -1 else None)
    return parser


def _add_option(parser: argparse.ArgumentParser, option: click.Option, dest: str, several: Mapping[str, Any]) -> None:
    how: dict[str, Any] = {"metavar": option.metavar}
    if option.is_flag:
        how = {"action": "store_true"}
    elif option.multiple:
        how |= several
    elif option.type.name in ("integer", "float"):
        how["type"] = int if option.type.name == "integer" else float
    default = option.default if isinstance(option.default, str | int | float) else None
    text = (option.help or "").replace("%", "%%")
    flags = dict.fromkeys("--" + each[2:].replace("-", "_") if each[:2] == "--" else each for each in option.opts)
    parser.add_argument(*flags, dest=dest, help=text, default=False if option.is_flag else default, **how)
    hyphened = [f"--{each[2:].replace('_', '-')}" for each in flags if "_" in each]
    if hyphened:
        parser.add_argument(*hyphened, dest=dest, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **how)


def run(
    command: click.Command, args: argparse.Namespace, names: Mapping[str, str] | None = None, **more: str | None
) -> Any:
    """Run one of drivetrain's commands with parsed arguments. Attributes that are not its parameters are ignored.

    Args:
        command: The command.
        args: The arguments, which the caller may have changed after parsing. None and False mean not given.
        names: As for `parser_of`.
        more: Values of parameters that are not in `args`.

    Raises:
        ConfigurationError: An argument is invalid.
        CalledProcessError: The command ended with an exit code other than 0.
    """
    words: list[str] = []
    for each in command.params:
        value = getattr(args, (names or {}).get(str(each.name), str(each.name)), None)
        value = more.get(str(each.name)) if value is None else value
        if isinstance(each, click.Option):
            words += _flag(each, value)
        elif value is not None:
            words += value if isinstance(value, list) else [str(value)]
    try:
        code = command.main(words, prog_name=command.name, standalone_mode=False)
    except click.ClickException as error:
        raise ConfigurationError(error.format_message()) from error
    if isinstance(code, int) and code:
        raise subprocess.CalledProcessError(code, ["drivetrain", str(command.name), *words])
    return code


def _flag(option: click.Option, value: Any) -> list[str]:
    flag = max(option.opts, key=len)
    if value is None or value is False:
        return []
    if option.is_flag:
        return [flag] if str(value).lower() == "true" else []
    values = value if isinstance(value, list | tuple) else [value]
    return [word for each in values for word in (flag, str(each))]
