"""`drivetrain config`: write the file that `drivetrain launch` reads, bring one up to date, show what is in force."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli.launch import add_settings
from drivetrain.launch.settings.table import SETTINGS
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import visible

if TYPE_CHECKING:
    from pathlib import Path

_INSTALL = 'pip install "drivetrain[config]"'
_FILE = click.option("--config_file", "--config-file", metavar="FILE", help="The file. Default: the user's own.")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_FILE
@click.pass_context
def config(context: click.Context, config_file: str | None) -> None:
    """Ask how scripts are launched, and write it to a file that `drivetrain launch` and Accelerate read."""
    if context.invoked_subcommand is None:
        path = _file(config_file)
        from drivetrain.cli.config_questions import Questionnaire

        _write(path, Questionnaire(_terminal()).ask())
    elif config_file is not None:
        context.obj = config_file


@config.command()
@_FILE
@click.option("--mixed_precision", "--mixed-precision", metavar="NAME", default="no", help="Default number format.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@click.pass_obj
def default(group_file: str | None, config_file: str | None, mixed_precision: str, overwrite: bool) -> None:
    """Write what suits this machine, without a question."""
    path = _file(config_file or group_file)
    precision = SETTINGS["mixed_precision"].parse(mixed_precision, "--mixed_precision")
    if path.exists() and not overwrite:
        raise ConfigurationError(
            f"{path} is there already. Replace it with --overwrite, or see `drivetrain config show`.", code="DT-009"
        )
    from drivetrain.runtime.devices import detect_device_kind

    kind = detect_device_kind()
    count = kind.default_processes()
    values: dict[str, Any] = {"num_processes": count, "mixed_precision": precision}
    if kind.name == "cpu":
        values["cpu"] = True
    elif kind.drives_all:
        values["tpu"] = True
    elif count > 1:
        values["multi_gpu"] = True
    _write(path, values)


@config.command()
@_FILE
@click.pass_obj
def update(group_file: str | None, config_file: str | None) -> None:
    """Write a file again in today's keys, such as one of an older Accelerate."""
    from drivetrain.launch.settings.file import read_config

    path = _file(config_file or group_file)
    values = read_config(path)
    _write(path.with_suffix(".yaml") if path.suffix == ".json" else path, values)


@config.command(context_settings={"token_normalize_func": lambda token: token.replace("-", "_")})
@click.option("--config_file", metavar="FILE", help="The file. Default: the user's own.")
@add_settings
@click.pass_obj
def show(group_file: str | None, /, config_file: str | None, **flags: Any) -> None:
    """Show each setting and where its value comes from, with the launcher's flags if some are given."""
    from drivetrain.launch.listing import settings_table
    from drivetrain.launch.options import LaunchOptions
    from drivetrain.launch.settings.file import default_config_file
    from drivetrain.launch.settings.sources import collect, find_config_file

    named = config_file or group_file
    given = collect({name: value for name, value in flags.items() if value != ()}, os.environ, named)
    options = LaunchOptions.from_given(given)
    file = find_config_file(named, os.environ)
    click.echo(visible(f"file: {file}" if file else f"file: none ({default_config_file()} is not there)"))
    click.echo(visible(settings_table(options, given)))


def _file(named: str | None) -> Path:
    from drivetrain.launch.settings.file import default_config_file

    return default_config_file({"DRIVETRAIN_CONFIG_FILE": named} if named else None)


def _write(path: Path, values: dict[str, Any]) -> None:
    from drivetrain.launch.options import LaunchOptions
    from drivetrain.launch.settings.file import write_config

    LaunchOptions.from_sources(values)  # refuses what cannot be
    write_config(path, values)
    click.echo(visible(f"Written: {path}"))


def _terminal() -> Terminal:
    """What asks the questions."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError(
            "`drivetrain config` asks questions, but this is no terminal. Use `drivetrain config default`, flags of "
            "`drivetrain launch`, or a file of Accelerate's with --config_file.",
            code="DT-015",
        )
    try:
        import questionary  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            f"`drivetrain config` asks through questionary, which is not installed. Install it: {_INSTALL}.",
            code="DT-013",
        ) from None
    return Terminal()


class Terminal:
    """Asks questions in a terminal, with questionary."""

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        """One of several answers."""
        import questionary

        return str(self._answer(questionary.select(question, choices=list(choices), default=default)))

    def confirm(self, question: str, default: bool) -> bool:
        """Yes or no."""
        import questionary

        return bool(self._answer(questionary.confirm(question, default=default)))

    def enter(self, question: str, name: str, default: str) -> Any:
        """The value of a setting, checked as it is entered."""
        import questionary

        setting = SETTINGS[name]

        def check(text: str) -> bool | str:
            try:
                setting.parse(text, name)
            except ConfigurationError as error:
                return error.message
            return True

        return setting.parse(self._answer(questionary.text(question, default=default, validate=check)) or None, name)

    @staticmethod
    def _answer(question: Any) -> Any:
        try:
            return question.unsafe_ask()
        except (KeyboardInterrupt, EOFError):
            raise click.exceptions.Abort from None
