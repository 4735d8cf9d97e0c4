"""The `to-fsdp2` command: convert a configuration file from FSDP 1 to FSDP 2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import visible
from drivetrain.runtime.yaml_text import load_yaml

# fsdp_sharding_strategy -> fsdp_reshard_after_forward
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_NUMBERED = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STRATEGY_KEYS = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")

# key -> reason for its removal
_WITHOUT_MEANING = {
    "fsdp_backward_prefetch": "FSDP 2 always prefetches the next unit during the backward",
    "fsdp_use_orig_params": "FSDP 2 always uses the model's original parameters",
    "fsdp_sync_module_states": "under FSDP 2 each process builds or loads its own shards",
    "fsdp_forward_prefetch": "Accelerate's FSDP 2 ignores it; use drivetrain's FSDP(forward_prefetch=...)",
}


@click.command(
    name="to-fsdp2",
    context_settings={
        "token_normalize_func": lambda token: token.replace("-", "_"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.option("--config_file", required=True, type=click.Path(dir_okay=False), help="YAML file to convert.")
@click.option("--output_file", type=click.Path(dir_okay=False), help="Output file. Default: the input file.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def to_fsdp2(config_file: str, output_file: str | None, overwrite: bool) -> None:
    """Convert a YAML configuration file from FSDP 1 to FSDP 2.

    Lists each key that is changed or removed. Comments in the file are lost.
    """
    import yaml

    source = Path(config_file)
    if not source.is_file():
        raise ConfigurationError(f"Configuration file {config_file!r} does not exist. Check the path.")
    if output_file is None and not overwrite:
        raise ConfigurationError("Pass --output_file, or --overwrite to replace the configuration file itself.")
    target = Path(output_file or config_file)
    if target.exists() and not overwrite:
        raise ConfigurationError(f"{str(target)!r} already exists. Pass another --output_file, or --overwrite.")
    try:
        config = load_yaml(source.read_text())
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{config_file!r} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{config_file!r} contains no settings. Use a file written by `drivetrain config`.")
    converted, changes = convert(config)
    target.write_text(yaml.safe_dump(converted))
    for change in changes:
        click.echo(visible(f"  {change}"))
    click.echo(visible(f"Wrote {target}."))


def convert(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a configuration dict from FSDP 1 to FSDP 2. Return the new dict and a list of the changes.

    Args:
        config: The contents of a configuration file, with an `fsdp_config` of version 1.

    Raises:
        ConfigurationError: There is no `fsdp_config`, its version is already 2, or a value is invalid.
    """
    old = config.get("fsdp_config")
    if not old:
        raise ConfigurationError("The file has no fsdp_config: there is nothing to convert.")
    if str(old.get("fsdp_version", 1)) == "2":
        raise ConfigurationError("fsdp_version is already 2. If the keys are of version 1, set fsdp_version to 1.")
    strategy, resharding = _strategy_of(old)
    if strategy == "NO_SHARD":
        return _unsharded(config)
    new: dict[str, Any] = {"fsdp_version": 2}
    changes = [f"fsdp_version: {old.get('fsdp_version', 1)} -> 2"]
    for key, value in old.items():
        if key in _WITHOUT_MEANING:
            changes.append(f"{key}: left out; {_WITHOUT_MEANING[key]}")
        elif key not in ("fsdp_version", *_STRATEGY_KEYS):
            new[key] = value
    if resharding is not None:
        new["fsdp_reshard_after_forward"] = resharding
        key = next(each for each in _STRATEGY_KEYS if each in old)
        changes.append(f"{key}: {old[key]} -> fsdp_reshard_after_forward: {str(resharding).lower()}")
    result = {**config, "fsdp_config": new}
    if strategy is not None and strategy.startswith("HYBRID"):
        result["parallelism_config"], change = _hybrid_mesh(config)
        changes.append(change)
    return result, changes


def _strategy_of(old: Mapping[str, Any]) -> tuple[str | None, bool | None]:
    key = next((each for each in _STRATEGY_KEYS if old.get(each) is not None), None)
    if key is None:
        return None, None
    value = old[key]
    if isinstance(value, bool):
        return None, value
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(_NUMBERED):
        name = _NUMBERED[int(name) - 1]
    if name in ("TRUE", "FALSE"):
        return None, name == "TRUE"
    if name not in _NUMBERED:
        raise ConfigurationError(f"{key} is {value!r}, but must be one of {', '.join(_NUMBERED)}.")
    return name, _RESHARDS.get(name)


def _unsharded(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kind = "MULTI_CPU" if config.get("use_cpu") else "MULTI_GPU"
    result = {key: value for key, value in config.items() if key != "fsdp_config"}
    return {**result, "distributed_type": kind}, [
        f"distributed_type: {config.get('distributed_type')} -> {kind}; NO_SHARD is equivalent to DDP, and FSDP 2 has "
        "no such mode",
        "fsdp_config: left out",
    ]


def _hybrid_mesh(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    # FSDP 1's HYBRID_SHARD shards parameters within a machine and replicates them between machines.
    machines, processes = int(config.get("num_machines") or 1), int(config.get("num_processes") or 1)
    if processes % machines:
        raise ConfigurationError(
            f"num_processes is {processes}, but must be divisible by num_machines, which is {machines}.",
        )
    prefix = "parallelism_config_"
    sizes = {
        **(config.get("parallelism_config") or {}),
        f"{prefix}dp_replicate_size": machines,
        f"{prefix}dp_shard_size": processes // machines,
    }
    return sizes, (
        f"{prefix}dp_replicate_size: {machines} and {prefix}dp_shard_size: {processes // machines}; "
        "shards within a machine, replicates between machines"
    )
