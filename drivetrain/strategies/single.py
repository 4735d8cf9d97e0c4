"""One process on one device."""

from __future__ import annotations

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Capability, Strategy
from drivetrain.strategies.capabilities import RepeatableStep, StepInBackward


class Single(Strategy):
    """One process on one device: the base class as it is."""

    name = "single"

    def setup(self, state: PartialState) -> None:
        """Take this process's place; there must be no peers."""
        environment = state.environment
        if environment.is_distributed:
            raise ConfigurationError(
                f"strategy={self.name!r} runs one process, but this is rank {environment.rank} of "
                f"{environment.world_size} (from {environment.source}). Use strategy='ddp' or 'auto', "
                "or start one process.",
                code="DT-034",
            )
        super().setup(state)

    def capability(self, kind: type[Capability]) -> Capability | None:
        """A step that lacked memory can be computed again; a backward can step."""
        return kind() if kind in (RepeatableStep, StepInBackward) else None
