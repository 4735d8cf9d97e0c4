"""`accelerate merge-weights` as a function."""

from __future__ import annotations

import argparse
from typing import Any

from drivetrain.compat.accelerate.utils.fsdp_utils import merge_fsdp_weights


def merge_command(args: argparse.Namespace) -> None:
    """Merge the weights in a checkpoint into one file."""
    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate merge-weights`."""
    text = "Merge the weights in a sharded checkpoint into one file."
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser(description=text)
        if subparsers is None
        else subparsers.add_parser("merge-weights", description=text)
    )
    parser.add_argument("checkpoint_directory", help="The checkpoint.")
    parser.add_argument("output_path", help="The directory of the file.")
    parser.add_argument("--unsafe_serialization", action="store_true", help="Write pytorch_model.bin.")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the checkpoint afterwards.")
    parser.set_defaults(func=merge_command)
    return parser
