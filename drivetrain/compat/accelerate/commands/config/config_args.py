"""Where Accelerate's configuration file is, and reading one."""

from __future__ import annotations

import os
from typing import Any

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.yaml_text import load_yaml

_home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
cache_dir = os.path.join(os.path.expanduser(_home), "accelerate")
default_json_config_file = os.path.join(cache_dir, "default_config.yaml")
default_yaml_config_file = os.path.join(cache_dir, "default_config.yaml")
default_config_file = default_yaml_config_file


class ClusterConfig:
    """What a configuration file holds, as attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        """The keys of the file."""
        return dict(vars(self))


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> ClusterConfig:
    """Read a configuration file."""
    path = default_config_file if config_file is None else config_file
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
    return ClusterConfig(**values)
