"""`accelerate tpu-config` as functions."""

from __future__ import annotations

import argparse
from typing import Any

from drivetrain.cli.tpu_config import gcloud_command, tpu_config
from drivetrain.compat.accelerate.commands.parsers import parser_of, run

__all__ = ["tpu_command_launcher", "tpu_command_parser"]


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate tpu-config`: commands to run on a TPU pod."""
    parser = parser_of(tpu_config, "tpu-config", subparsers)
    parser.set_defaults(func=tpu_command_launcher)
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run commands on all workers of a TPU pod. With `args.debug`, only print the `gcloud` command.

    Raises:
        CalledProcessError: A worker's command failed.
    """
    if args.debug:
        options = {each: getattr(args, each) for each in vars(args) if each not in ("debug", "func")}
        print("Running", *gcloud_command(**options))
    else:
        run(tpu_config, args)
