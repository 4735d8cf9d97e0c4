"""Strategies without options."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.compat.lightning.instances import StandsFor
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.strategies import Single, Strategy

__all__ = ["SingleDeviceStrategy", "Strategy"]


class SingleDeviceStrategy(StrategyMembers, Single, metaclass=StandsFor, original=Single):
    """One process on one device. What `Trainer(strategy="auto")` makes for one is an instance of it too.

    Args:
        device: Its device until it runs; `Trainer(accelerator=...)` chooses that of the run.
        accelerator: Taken for Lightning's sake.
    """

    def __init__(self, device: Any = "cpu", accelerator: Any = None) -> None:
        super().__init__()
        self._given_device = torch.device(device)
