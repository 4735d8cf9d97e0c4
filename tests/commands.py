"""The command line, called in the process of the test."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from drivetrain.cli.main import cli


def drivetrain(*arguments: object) -> Result:
    """Run `drivetrain` with some arguments, and raise the errors that a shell would be shown."""
    return CliRunner().invoke(cli, [str(each) for each in arguments], catch_exceptions=False)


def exit_code_of(*arguments: object) -> Any:
    """Run `drivetrain` with output that the test does not need, and return its exit code."""
    return cli.main([str(each) for each in arguments], standalone_mode=False)
