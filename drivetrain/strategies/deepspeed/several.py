"""Several configurations in one strategy: each model's engine keeps the one that it was prepared with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.base import Strategy
from drivetrain.strategies.capabilities import Configurations
from drivetrain.strategies.deepspeed.settings import Settings

if TYPE_CHECKING:
    from drivetrain.strategies.deepspeed.strategy import DeepSpeed


class Several(Configurations):
    """The configurations of a `DeepSpeed`.

    Args:
        strategy: Whose they are.

    Attributes:
        named: Those that were added, by name.
    """

    def __init__(self, strategy: DeepSpeed) -> None:
        self._strategy = strategy
        self.named: dict[str, Settings] = {}

    def add(self, name: str, other: Strategy) -> None:
        """Hold the configuration of another `DeepSpeed`, which has not been set up."""
        settings = getattr(other, "settings", None)
        if not isinstance(settings, Settings):
            raise ConfigurationError(
                f"{name!r} is {other!r}; beside {self._strategy!r} only a DeepSpeed can be.", code="DT-004"
            )
        self._strategy.check_settings(settings)
        self.named[name] = replace(settings, shards_frozen=settings.stage == 3)
        if settings.stage == 3:
            self._strategy.needs_even_batches = True

    def select(self, name: str) -> None:
        """Place what is prepared from now on by one of them."""
        self._strategy.settings = self.named[name]
