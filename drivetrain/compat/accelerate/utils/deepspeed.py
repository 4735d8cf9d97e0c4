"""DeepSpeed's configuration, dummy optimizer and dummy scheduler under Accelerate's names."""

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
    """DeepSpeed configuration whose values are read by paths such as `"zero_optimization.stage"`.

    Attributes:
        config: Copy of the given configuration.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Recompute the ZeRO stage and the offload flag from the configuration."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = [
            self.get_value(f"zero_optimization.{name}.device") for name in ("offload_optimizer", "offload_param")
        ]
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section that contains the last key of a path, and that key. The section may be None."""
        *sections, name = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if node is None:
                return None, name
        return node, name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a path, or `default`."""
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete the value at a path. Raise `ConfigurationError` if it is missing and `must_exist` is set."""
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise ConfigurationError(f"The DeepSpeed configuration has no {ds_key_long!r}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Return True if the value at a path is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return True if the value at a path is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return True for ZeRO stage 2, which shards gradients and optimizer states."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return True for ZeRO stage 3, which also shards parameters."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return True if parameters or optimizer states are offloaded."""
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
    """Return the DeepSpeed plugin in use. Raise `ConfigurationError` if there is none."""
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is None:
        raise ConfigurationError(
            'This Accelerator is without DeepSpeed; make it with a plugin or strategy="deepspeed".'
        )
    return plugin
