"""Functions of the user's that run before a state is saved or loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import nn

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


class HookHandle:
    """Takes a registered hook back."""

    def __init__(self, hooks: dict[int, Any], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        """Let the hook be called no more."""
        self._hooks.pop(self._number, None)


class StateHooks:
    """The hooks of one Accelerator, called in the order in which they were registered."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._save: dict[int, SaveHook] = {}
        self._load: dict[int, LoadHook] = {}

    @property
    def on_save(self) -> list[SaveHook]:
        """What is called before saving."""
        return list(self._save.values())

    @property
    def on_load(self) -> list[LoadHook]:
        """What is called before loading."""
        return list(self._load.values())

    def add_save(self, hook: SaveHook) -> HookHandle:
        """Register one for saving."""
        number = next(self._numbers)
        self._save[number] = hook
        return HookHandle(self._save, number)

    def add_load(self, hook: LoadHook) -> HookHandle:
        """Register one for loading."""
        number = next(self._numbers)
        self._load[number] = hook
        return HookHandle(self._load, number)
