"""Utilities that the Trainer and Fabric share."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from warnings import filterwarnings

import torch

from drivetrain.compat.lightning.enums import LightningEnum
from drivetrain.compat.lightning.fabric.utilities.rank_zero import (
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning
from drivetrain.runtime.pytrees import send_to_device

__all__ = [
    "LightningEnum",
    "disable_possible_user_warnings",
    "is_shared_filesystem",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Move the tensors of a nested structure to a device."""
    return send_to_device(batch, torch.device(device))


def measure_flops(model: torch.nn.Module, forward_fn: Any, loss_fn: Any = None) -> int:
    """Count the floating-point operations of a forward pass, and of the backward pass if `loss_fn` is given."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        outputs = forward_fn()
        if loss_fn is not None:
            loss_fn(outputs).backward()
    return int(counter.get_total_flops())


def is_shared_filesystem(strategy: Any, path: str | Path | None = None, timeout: int = 3) -> bool:
    """Return True if all machines share a file system, which is assumed for one machine only."""
    return bool(strategy.topology.environment.num_nodes == 1)


def disable_possible_user_warnings(module: str = "") -> None:
    """Suppress warnings of the category `PossibleUserWarning`."""
    filterwarnings("ignore", module=module, category=PossibleUserWarning)


# Imported lazily, to avoid an import cycle.
_LATE = {
    "AttributeDict": "data",
    "suggested_max_num_workers": "data",
    "Throughput": "throughput",
    "ThroughputMonitor": "throughput",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
