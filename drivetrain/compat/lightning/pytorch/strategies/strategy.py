"""Strategies without options."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.compat.instances import StandsFor
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.strategies import Single, Strategy

__all__ = ["SingleDeviceStrategy", "Strategy"]


class SingleDeviceStrategy(StrategyMembers, Single, metaclass=StandsFor, original=Single):
    """One process on one device. The strategy of a Trainer with one device passes `isinstance`."""

    def __init__(
        self,
        device: Any = "cpu",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        precision: Any = None,
    ) -> None:
        super().__init__()
        given = {"precision_plugin": precision_plugin, "precision": precision, "checkpoint_io": checkpoint_io}
        self.take_plugins(given)
        self._given_device = torch.device(device)
