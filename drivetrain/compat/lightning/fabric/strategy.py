"""`fabric.strategy`: the methods behind Fabric's API, which a script can override."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.compat.lightning.strategy_members import StrategyView
from drivetrain.strategies.base import lay_out_state

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

Filter = Callable[[str, Any], bool]


class FabricStrategy(StrategyView):
    """Strategy of a custom training loop, with the methods of Lightning's strategies."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator.strategy, accelerator.precision.name)
        object.__setattr__(self, "_accelerator", accelerator)

    # gradients

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a loss."""
        named = dict(zip(("gradient", "retain_graph", "create_graph"), args, strict=False))
        self._accelerator.backward(tensor, **named, **kwargs)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each gradient element to the range [-clip_val, clip_val]."""
        self._accelerator.clip_grad_value_(module.parameters(), clip_val)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradient norm. Return the norm before clipping."""
        norm: Tensor = self._accelerator.clip_grad_norm_(module.parameters(), max_norm, float(norm_type))
        if error_if_nonfinite and norm is not None and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"The norm of the gradients is {norm}, so they cannot be clipped.")
        return norm

    # states

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state dict of a module. Call it on all processes."""
        state: dict[str, Any] = self._accelerator.get_state_dict(module)
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict into a module."""
        self._accelerator.unwrap_model(module).load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer."""
        return optimizer.state_dict()

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Filter] | None = None,
    ) -> None:
        """Save a dict of values. Objects with a `state_dict` method are saved by it."""
        written = {name: self._state_of(value) for name, value in state.items()}
        for name, keeps in (filter or {}).items():
            if isinstance(written[name], Mapping):
                written[name] = {key: value for key, value in written[name].items() if keeps(key, value)}
        if self.is_global_zero:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._accelerator.save(written, path)
        self.barrier()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a file that `save_checkpoint` or `torch.save` wrote."""
        found = torch.load(path, map_location="cpu", weights_only=weights_only is not False)
        if isinstance(state, nn.Module | Optimizer):
            self._fill(state, found, strict)
            return {}
        for name in list(state or {}):
            if name not in found:
                if strict:
                    raise KeyError(f"{os.fspath(path)} has no {name!r}; it has {', '.join(sorted(found))}.")
                continue
            value = found.pop(name)
            if not self._fill(state[name], value, strict):
                state[name] = value
        return dict(found)

    def _state_of(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.get_module_state_dict(value)
        return value.state_dict() if callable(getattr(value, "state_dict", None)) else value

    def _fill(self, target: Any, value: Any, strict: bool) -> bool:
        """Load a state dict into an object. Return False if the object has no `load_state_dict`."""
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, value, strict)
        elif callable(getattr(target, "load_state_dict", None)):
            target.load_state_dict(value)
            if isinstance(target, Optimizer):
                lay_out_state(target)
        else:
            return False
        return True
