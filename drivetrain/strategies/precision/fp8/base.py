"""`FP8Backend`: which package computes in 8-bit floats, and what it needs around a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError, nearest


class FP8Backend(ABC):
    """A package that computes in 8-bit floats.

    Attributes:
        name: The name that users write.
        recipes: The names of its ways of scaling, the default first.
        recipe: The one in use.
    """

    name: ClassVar[str]
    recipes: ClassVar[tuple[str, ...]]
    recipe: str

    @abstractmethod
    def setup(self, kind: DeviceKind) -> None:
        """Bind the backend to a kind of device.

        Raises:
            ConfigurationError: The package is missing, or cannot run there; the message names what would work.
        """

    @abstractmethod
    def convert(self, model: nn.Module, layers: Sequence[nn.Linear], kept: Sequence[nn.Linear]) -> None:
        """Let layers of a model compute in 8-bit floats; their parameters and names stay what they are.

        Args:
            model: The bare model, which is changed in place.
            layers: Its layers to convert.
            kept: The others.
        """

    def context(self) -> AbstractContextManager[Any] | None:
        """What a forward must run in; None where nothing is needed."""
        return None

    def prepare_optimizer(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> Optimizer:
        """See an optimizer once before its first step.

        Args:
            optimizer: The optimizer.
            models: The bare models that were converted.

        Returns:
            The optimizer to step in its place.
        """
        return optimizer

    def after_step(self, optimizer: Optimizer) -> None:
        """Bring up to date what depends on the parameters that an optimizer has just changed."""

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        """What scaling must remember over a restart, such as the largest values of past steps."""
        return {}

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


def check_choice(option: str, given: Any, allowed: Sequence[str]) -> str:
    """One of some names, whatever its case.

    Raises:
        ConfigurationError: It is none of them.
    """
    names = {name.lower(): name for name in allowed}
    if not isinstance(given, str) or given.lower() not in names:
        raise ConfigurationError(
            f"{option}={given!r}. Allowed: {', '.join(allowed)}.{nearest(str(given).lower(), names)}", code="DT-001"
        )
    return names[given.lower()]
