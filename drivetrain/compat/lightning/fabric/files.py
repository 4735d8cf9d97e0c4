"""The part of Fabric that writes and reads states."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.accelerator import Accelerator
from drivetrain.compat.lightning.fabric.stepping import forward_module
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError


class StateFiles:
    """What a loop keeps."""

    accelerator: Accelerator

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
        written = {name: self._state_of(value) for name, value in state.items()}
        for name, keeps in (filter or {}).items():
            if isinstance(written[name], Mapping):
                written[name] = {key: value for key, value in written[name].items() if keeps(key, value)}
        if self.accelerator.is_main_process:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.accelerator.save(written, path)
        self.accelerator.wait_for_everyone()

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
        found = torch.load(path, map_location="cpu", weights_only=weights_only is not False)
        for name in list(state or {}):
            assert state is not None
            if name not in found:
                if strict:
                    raise KeyError(f"{os.fspath(path)} has no {name!r}; it has {', '.join(sorted(found))}.")
                continue
            value = found.pop(name)
            if not self._fill(state[name], value, strict):
                state[name] = value
        return dict(found)

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
        self._fill(obj, torch.load(path, map_location="cpu", weights_only=weights_only is not False), strict)

    def _state_of(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.accelerator.get_state_dict(forward_module(value))
        return value.state_dict() if callable(getattr(value, "state_dict", None)) else value

    def _fill(self, target: Any, value: Any, strict: bool) -> bool:
        """Give an object a state. Returns whether it takes one."""
        if isinstance(target, nn.Module):
            self.accelerator.unwrap_model(forward_module(target)).load_state_dict(value, strict=strict)
        elif callable(getattr(target, "load_state_dict", None)):
            target.load_state_dict(value)
        else:
            return False
        return True


def _check_filter(given: Any, state: Mapping[str, Any]) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(f"save(filter=...) should be a dict of functions by name, given {given!r}.")
    unknown = {name for name in given if name not in state}
    if unknown:
        raise ConfigurationError(
            f"save(filter=...): the keys {unknown} are not present in the state keys {set(state)}."
        )
    for name, keeps in given.items():
        if not callable(keeps):
            raise ArgumentTypeError(
                f"save(filter=...): the value for {name!r} should be a callable, given {keeps!r}. Give a function "
                "(key, value) -> bool."
            )
