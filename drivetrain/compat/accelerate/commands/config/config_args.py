"""Read and write Accelerate's configuration files, and locate the default one."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any, ClassVar, Self

from drivetrain.launch.options import GROUPS
from drivetrain.launch.settings.sources import KEYS
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.yaml_text import load_yaml

_home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
cache_dir = os.path.join(os.path.expanduser(_home), "accelerate")
default_json_config_file = os.path.join(cache_dir, "default_config.yaml")
default_yaml_config_file = os.path.join(cache_dir, "default_config.yaml")
default_config_file = default_yaml_config_file


class BaseConfig:
    """Values of a configuration file, as attributes."""

    _DEFAULTS: ClassVar[dict[str, Any]] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": None,
        "use_cpu": False,
        "debug": False,
    }

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(copy.deepcopy(self._DEFAULTS) | values)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dict, without keys whose value is None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_yaml_file(cls, yaml_file: str | os.PathLike[str] | None = None) -> Self:
        """Read a configuration from a YAML file."""
        return cls(**_read(default_yaml_config_file if yaml_file is None else yaml_file))

    from_json_file = from_yaml_file

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write the configuration to a YAML file."""
        import yaml

        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write the configuration to a JSON file."""
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")


class ClusterConfig(BaseConfig):
    """Configuration for this machine or a cluster."""

    _DEFAULTS: ClassVar[dict[str, Any]] = {
        **BaseConfig._DEFAULTS,
        "num_processes": -1,
        "num_machines": 1,
        "machine_rank": 0,
        "gpu_ids": None,
        "main_process_ip": None,
        "main_process_port": None,
        **{name: {} for name in GROUPS},
    }


class SageMakerConfig(BaseConfig):
    """Configuration for SageMaker. drivetrain cannot start SageMaker jobs."""


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> BaseConfig:
    """Read a configuration file."""
    values = _read(default_config_file if config_file is None else config_file)
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        return SageMakerConfig(**values)
    unknown = sorted(set(values) - set(KEYS))
    if unknown:
        raise ConfigurationError(f"The config file at {os.fspath(config_file or '')!r} had unknown keys {unknown}.")
    return ClusterConfig(**values)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise ConfigurationError(f"There is no configuration file {os.fspath(path)!r}.")
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = load_yaml(file.read())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{os.fspath(path)!r} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{os.fspath(path)!r} holds no keys and values.")
    return values
