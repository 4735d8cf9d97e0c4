"""DeepSpeed's configuration and stand-ins under Accelerate's names."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Mapping
from typing import Any

from drivetrain.compat.accelerate.absent import INTERNAL, absent_names
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.deepspeed import DummyOptim, DummyScheduler

__all__ = ["DummyOptim", "DummyScheduler", "HfDeepSpeedConfig", "get_active_deepspeed_plugin"]

__getattr__ = absent_names(
    __name__,
    (
        INTERNAL,
        [
            "DeepSpeedEngineWrapper",
            "DeepSpeedOptimizerWrapper",
            "DeepSpeedSchedulerWrapper",
            "map_pytorch_optim_to_deepspeed",
        ],
    ),
)


class HfDeepSpeedConfig:
    """A DeepSpeed configuration that is asked by paths such as `"zero_optimization.stage"`.

    Attributes:
        config: The configuration; a copy of what was given.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Find out again which stage of ZeRO this is and whether anything is offloaded."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = [
            self.get_value(f"zero_optimization.{name}.device") for name in ("offload_optimizer", "offload_param")
        ]
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section that holds the last part of a path, and that part; None where there is no such section."""
        *sections, name = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if node is None:
                return None, name
        return node, name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value at a path."""
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Take out what is at a path."""
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise ConfigurationError(f"The DeepSpeed configuration has no {ds_key_long!r}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the value at a path is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the value at a path is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether gradients and optimizer states are sharded."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded too."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether anything is kept off the device."""
        return self._offload


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    try:
        if isinstance(given, (str, os.PathLike)) and os.path.exists(given):
            with open(given, encoding="utf-8") as file:
                return dict(json.load(file))
        return dict(json.loads(base64.urlsafe_b64decode(str(given)).decode("utf-8")))
    except (ValueError, TypeError, RecursionError):
        raise ConfigurationError(
            f"A DeepSpeed configuration is a dict, the path of a JSON file, or its text in base64; got {given!r}.",
        ) from None


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The DeepSpeed options in use."""
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is None:
        raise ConfigurationError(
            'This Accelerator is without DeepSpeed; make it with a plugin or strategy="deepspeed".'
        )
    return plugin
