"""Accelerate's configuration file: where it is and what it holds."""

from drivetrain.compat.accelerate.commands.config.config_args import (
    BaseConfig,
    ClusterConfig,
    SageMakerConfig,
    cache_dir,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    load_config_from_file,
)

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "SageMakerConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "load_config_from_file",
]
