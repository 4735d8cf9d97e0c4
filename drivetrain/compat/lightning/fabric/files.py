"""The part of Fabric that writes and reads states."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.accelerator import PreparedOptimizer
from drivetrain.compat.lightning.fabric.stepping import forward_module
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError


class StateFiles:
    """What a loop keeps."""

    _strategy: Any

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a state: modules and optimizers as their states, anything else as it is; call it on all processes.

        Args:
            path: The file.
            state: What to write, by name.
            filter: For each name, a function `(key, value) -> bool` that chooses entries of its state.

        Raises:
            ConfigurationError: A filter is no function, or for a name that is not in the state.
        """
        _check_filter(filter, state)
        self._strategy.save_checkpoint(path=path, state=_unwrapped(state), filter=filter)

    def load(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a state that `save` wrote, into modules and optimizers.

        Args:
            path: The file.
            state: What to fill, by name; values that are neither modules nor optimizers are replaced.
            strict: Whether a name that the file does not have is an error.
            weights_only: False unpickles objects too: only for files of those whom you trust.

        Returns:
            What was left over; everything without `state`.

        Raises:
            KeyError: The file has no such name.
        """
        bare = None if state is None else _unwrapped(state)
        rest: dict[str, Any] = self._strategy.load_checkpoint(
            path=path, state=bare, strict=strict, weights_only=weights_only
        )
        if state is not None and bare is not None:
            for name, value in bare.items():
                if value is not _bare(state[name]):
                    state[name] = value
        return rest

    def load_raw(
        self,
        path: str | os.PathLike[str],
        obj: nn.Module | Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Read the state of one module or optimizer.

        Args:
            path: The file.
            obj: What to fill.
            strict: Whether other names of weights are an error.
            weights_only: False unpickles objects too.
        """
        self._strategy.load_checkpoint(path=path, state=_bare(obj), strict=strict, weights_only=weights_only)


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _bare(value) for name, value in state.items()}


def _bare(value: Any) -> Any:
    """What the strategy made of a module, and an optimizer as it was, in the place of what Fabric made of them."""
    if isinstance(value, nn.Module):
        return forward_module(value)
    return value.optimizer if isinstance(value, PreparedOptimizer) else value


def _check_filter(given: Any, state: Mapping[str, Any]) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(f"save(filter=...) should be a dict of functions by name, given {given!r}.")
    unknown = {name for name in given if name not in state}
    if unknown:
        raise ConfigurationError(
            f"save(filter=...): the keys {unknown} are not present in the state keys {set(state)}.", code="DT-006"
        )
    for name, keeps in given.items():
        if not callable(keeps):
            raise ArgumentTypeError(
                f"save(filter=...): the value for {name!r} should be a callable, given {keeps!r}. Give a function "
                "(key, value) -> bool."
            )
