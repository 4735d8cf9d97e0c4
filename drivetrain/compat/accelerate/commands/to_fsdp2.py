"""`accelerate to-fsdp2` as functions."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.cli.to_fsdp2 import convert, to_fsdp2
from drivetrain.compat.accelerate.commands.parsers import parser_of
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.yaml_text import load_yaml

__all__ = ["convert_config_to_fsdp2", "load_config", "to_fsdp2_command", "to_fsdp2_command_parser"]

logger = logging.getLogger(__name__)


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate to-fsdp2`: the file to convert and the file to write."""
    parser = parser_of(to_fsdp2, "to-fsdp2", subparsers)
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def load_config(config_file: str) -> dict[str, Any]:
    """Read a YAML configuration file. Raise `ConfigurationError` if it is not a mapping."""
    values = load_yaml(Path(config_file).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ConfigurationError(f"{config_file!r} holds no keys and values.")
    return values


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration from FSDP 1 to FSDP 2. A configuration for FSDP 2 is returned unchanged."""
    if str((config.get("fsdp_config") or {}).get("fsdp_version", 1)) == "2":
        logger.warning("Config already specifies FSDP2, skipping conversion...")
        return dict(config)
    return convert(config)[0]


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a configuration file from FSDP 1 to FSDP 2.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigurationError: No file to write was given, or the file has nothing to convert.
        FileExistsError: The file to write exists, and may not be replaced.
    """
    import yaml

    if not Path(args.config_file).is_file():
        raise FileNotFoundError(f"Config file {args.config_file!r} does not exist.")
    if args.output_file is None and not args.overwrite:
        raise ConfigurationError("Pass --output_file, or --overwrite to replace the configuration file itself.")
    target = Path(args.config_file if args.output_file is None else args.output_file)
    if not args.overwrite and target.exists():
        raise FileExistsError(f"{str(target)!r} already exists. Pass another --output_file, or --overwrite.")
    target.write_text(yaml.safe_dump(convert_config_to_fsdp2(load_config(args.config_file))), encoding="utf-8")
