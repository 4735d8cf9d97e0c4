"""`accelerate launch` as functions: the processes are started by `drivetrain launch`."""

from __future__ import annotations

import argparse
from typing import Any

from drivetrain.cli.launch import launch
from drivetrain.compat.accelerate.absent import OTHER_LAUNCHER, absent_names
from drivetrain.compat.accelerate.commands.parsers import parser_of, run

__all__ = [
    "deepspeed_launcher",
    "launch_command",
    "launch_command_parser",
    "multi_gpu_launcher",
    "simple_launcher",
    "tpu_launcher",
]

_NAMES = {"script": "training_script", "args": "training_script_args"}

__getattr__ = absent_names(__name__, (OTHER_LAUNCHER, ["tpu_pod_launcher", "sagemaker_launcher"]))


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate launch`: its flags, the script and the script's arguments."""
    parser = parser_of(launch, "launch", subparsers, _NAMES)
    parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Start a script with the given launch options, and wait until it exits.

    Raises:
        ConfigurationError: An argument or a key of the configuration file is invalid.
        CalledProcessError: A process of the script failed.
    """
    run(launch, args, _NAMES, stand_in="accelerate")


simple_launcher = multi_gpu_launcher = deepspeed_launcher = tpu_launcher = launch_command
