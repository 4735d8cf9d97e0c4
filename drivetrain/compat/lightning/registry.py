"""Registries of strategies and accelerators, to which scripts add their own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

CONFIG_VARIABLE = "PL_DEEPSPEED_CONFIG_PATH"
"""Names DeepSpeed's configuration where a script gives none."""

_CONFIGURED = {"deepspeed": "DeepSpeedStrategy"}


class Registry(dict[str, dict[str, Any]]):
    """Mapping from names to classes with their constructor arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def register(
        self, name: str, factory: Callable[..., Any] | None = None, description: str = "", **init_params: Any
    ) -> Any:
        """Register a class under a name. Without a class, return a decorator."""

        def add(kind: Callable[..., Any]) -> Callable[..., Any]:
            self[name] = {
                self._kind: kind,
                f"{self._kind}_name": name,
                "description": description,
                "init_params": init_params,
            }
            return kind

        return add if factory is None else add(factory)

    def get(self, name: str, default: Any = None) -> Any:
        """Create the object registered under a name. Without one, return `default` or raise `KeyError`."""
        if name in self:
            return self[name][self._kind](**self[name]["init_params"])
        if default is not None:
            return default
        raise KeyError(f"{name!r} is not in the registry. Available names: {', '.join(sorted(self)) or 'none'}.")

    def remove(self, name: str) -> None:
        """Remove a name."""
        self.pop(name)

    def __str__(self) -> str:
        return f"Registered: {', '.join(self)}"


class StrategyRegistry(Registry):
    """Registry of strategies.

    Attributes:
        built_in: Names that drivetrain resolves without the registry.
    """

    def __init__(self) -> None:
        super().__init__("strategy")
        self.built_in: set[str] = set()

    def register(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.built_in.discard(name)
        return super().register(name, *args, **kwargs)

    def made(self, name: Any) -> Any:
        """Create the strategy that a script registered under a name. Other values are returned unchanged.

        A DeepSpeed name creates a strategy here only if an environment variable gives its configuration file.
        """
        if isinstance(name, str) and name in _CONFIGURED and os.environ.get(CONFIG_VARIABLE):
            strategies = importlib.import_module("drivetrain.compat.lightning.pytorch.strategies")
            return getattr(strategies, _CONFIGURED[name])()
        is_own = isinstance(name, str) and name in self and name not in self.built_in
        return self.get(name) if is_own else name

    def available_strategies(self) -> list[str]:
        """Return the names of all strategies."""
        return list(self)


class AcceleratorRegistry(Registry):
    """Registry of accelerators."""

    def __init__(self) -> None:
        super().__init__("accelerator")

    def available_accelerators(self) -> set[str]:
        """Return the names of all accelerators."""
        return set(self)


STRATEGIES = StrategyRegistry()
"""What `lightning.pytorch.strategies.StrategyRegistry` is, which puts the built-in names in when it is imported."""
