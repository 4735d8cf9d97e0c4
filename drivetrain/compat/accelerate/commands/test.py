"""`accelerate test` as functions."""

from __future__ import annotations

import argparse
from typing import Any

from drivetrain.cli.test import test
from drivetrain.compat.accelerate.commands.parsers import HYPHENS, run

__all__ = ["test_command", "test_command_parser"]


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028
    """Return the parser of `accelerate test`, which accepts a configuration file."""
    text = f"{test.get_short_help_str(200)} {HYPHENS}"
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser("accelerate test", description=text)
        if subparsers is None
        else subparsers.add_parser("test", description=text)
    )
    parser.add_argument("--config_file", "--config-file", help="Configuration file. Default: the user's own.")
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Check the configured setup with a short training run.

    Raises:
        CalledProcessError: A check failed.
    """
    flags = [] if args.config_file is None else ["--config_file", args.config_file]
    run(test, argparse.Namespace(flags=flags))
