"""A flag that one process raises and all processes read."""

from __future__ import annotations

import torch

from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.state import PartialState


class Trigger:
    """A flag that any process may raise, such as on a metric that only it computes.

    Args:
        state: This process among its peers.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._raised = False

    def set(self) -> None:
        """Raise the flag on this process."""
        self._raised = True

    def check(self) -> bool:
        """Whether any process raised the flag; lowers it. Call it on all processes."""
        flag = torch.tensor(int(self._raised), device=self._state.device)
        self._raised = False
        return bool(reduce(flag, "max").item())
