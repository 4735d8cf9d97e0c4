"""One process on one device."""

from __future__ import annotations

from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Strategy, require_single_process_group


class Single(Strategy):
    """One process on one device: the base class as it is."""

    name = "single"

    def setup(self, state: PartialState) -> None:
        """Take this process's place; there must be no peers."""
        require_single_process_group(self.name, state.environment)
        super().setup(state)
