"""`accelerate env` as functions."""

from __future__ import annotations

import argparse
from typing import Any

from drivetrain.cli.env import env
from drivetrain.compat.accelerate.commands.parsers import parser_of, run

__all__ = ["env_command", "env_command_parser"]


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate env`, which accepts a configuration file."""
    parser = parser_of(env, "env", subparsers)
    parser.set_defaults(func=env_command)
    return parser


def env_command(args: argparse.Namespace) -> None:
    """Print versions, devices and settings."""
    run(env, args)
