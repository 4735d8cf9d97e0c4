"""Write a configuration file for this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from drivetrain.compat.accelerate.commands.config.config_args import default_json_config_file
from drivetrain.compat.accelerate.utils.environment import get_current_device_type
from drivetrain.runtime.devices import detect_device_kind


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Any:
    """Write a configuration file for this machine. Return its path, or False if the file exists."""
    path = Path(default_json_config_file if save_location is None else save_location)
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = detect_device_kind()
    processes = 1 if kind.name == "cpu" else kind.count()
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": get_current_device_type()[0] if processes > 1 else "NO",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision.lower(),
        "num_machines": 1,
        "num_processes": processes,
        "use_cpu": kind.name == "cpu",
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path
