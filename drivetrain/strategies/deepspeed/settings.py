"""One DeepSpeed configuration with what belongs to it; a strategy may hold several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from drivetrain.strategies.deepspeed import config as configuration
from drivetrain.strategies.deepspeed.config import Config


@dataclass
class Settings:
    """One configuration.

    Args:
        config: The user's, with `"auto"` where the loop decides.
        stage: That of ZeRO.
        zero_init: Whether `init_context` takes parameters apart where they are made.
        moe_layers: Names of module classes that ZeRO-3 gathers as a whole.
        shards_frozen: Whether ZeRO-3 also takes apart a model that was built whole and has no optimizer.
    """

    config: Config
    stage: int
    zero_init: bool = False
    moe_layers: Sequence[str | type[nn.Module]] = field(default_factory=list)
    shards_frozen: bool = False

    @property
    def clipping(self) -> float | None:
        """The norm that the configuration clips to, if it does."""
        return configuration.clipping_of(self.config)

    @property
    def without_training(self) -> Config:
        """The configuration of a model that is only evaluated."""
        return {key: value for key, value in self.config.items() if key not in ("optimizer", "scheduler")}
