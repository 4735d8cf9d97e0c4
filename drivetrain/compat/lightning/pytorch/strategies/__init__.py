"""Strategies under Lightning's class names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.pytorch.strategies.ddp import DDPStrategy
from drivetrain.compat.lightning.pytorch.strategies.strategy import SingleDeviceStrategy, Strategy
from drivetrain.compat.lightning.reasons import STRATEGY

if TYPE_CHECKING:
    from drivetrain.compat.lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from drivetrain.compat.lightning.pytorch.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from drivetrain.compat.lightning.pytorch.strategies.registry import StrategyRegistry as StrategyRegistry

__all__ = ["DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "SingleDeviceStrategy", "Strategy", "StrategyRegistry"]

_ABSENT = ("ModelParallelStrategy", "ParallelStrategy", "SingleDeviceXLAStrategy", "XLAStrategy")

_absent = absent_names(__name__, (STRATEGY, _ABSENT))


# importing torch's FSDP takes nearly a second
_LATE = {"FSDPStrategy": "fsdp", "DeepSpeedStrategy": "deepspeed", "StrategyRegistry": "registry"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    return _absent(name)
