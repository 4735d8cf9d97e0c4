"""`accelerate estimate-memory` as functions."""

from __future__ import annotations

import argparse
from typing import Any

from drivetrain.compat.accelerate.commands.parsers import parser_of, run
from drivetrain.planning.estimate_memory import estimate_memory

__all__ = ["estimate_command", "estimate_command_parser"]

_NAMES = {"model": "model_name"}


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate estimate-memory`, which accepts a model and its dtypes."""
    parser = parser_of(estimate_memory, "estimate-memory", subparsers, _NAMES)
    parser.set_defaults(func=estimate_command)
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print the memory that a model needs for training and inference.

    Raises:
        ConfigurationError: The model is not a file of this machine, or an argument is invalid. Nothing is downloaded.
    """
    run(estimate_memory, args, _NAMES)
