"""The state of models on XLA devices: whole tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime import xla
from drivetrain.runtime.nested import recursively_apply
from drivetrain.strategies.model_state import ModelState, StateDict
from drivetrain.strategies.topology import Topology
from drivetrain.strategies.xla.parts import to_host


class XLAState(ModelState):
    """The state of a model and its optimizers, read from the devices at once and whole, however it is sharded.

    Args:
        topology: This process's place.
        unwrap: Returns the user's own module inside what `prepare` returned.
        place_like: Spreads a tensor of an optimizer's state like the parameter that it belongs to.
    """

    def __init__(
        self,
        topology: Topology,
        unwrap: Callable[[nn.Module], nn.Module],
        place_like: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        super().__init__(topology, unwrap)
        self._place_like = place_like

    def model(self, model: nn.Module) -> StateDict:
        """Parameters and buffers, on the CPU."""
        xla.sync()
        state = self.unwrap(model).state_dict(keep_vars=True)
        return {name: to_host(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state, on the CPU."""
        xla.sync()
        state = super().optimizer(model, optimizer)
        return {**state, "state": recursively_apply(to_host, state["state"])}

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0; an empty dict elsewhere."""
        xla.sync()
        if self.topology.rank != 0:
            return {}
        state = self.unwrap(model).state_dict(keep_vars=True)
        return {name: to_host(value) for name, value in state.items() if isinstance(value, torch.Tensor)}

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Load, and let the values be on the devices before the next step is recorded."""
        known = self.unwrap(model).state_dict(keep_vars=True)
        spread = {name: self._spread(value, known.get(name)) for name, value in state.items()}
        result = super().load_model(model, spread, strict)
        xla.sync()
        return result

    def _spread(self, value: Any, parameter: Any) -> Any:
        """A saved value on the devices like the parameter that it belongs to: `copy_` sends all of it to each."""
        tensors = isinstance(value, torch.Tensor) and isinstance(parameter, nn.Parameter)
        if not tensors or parameter.device.type != "xla" or value.shape != parameter.shape:
            return value
        moved = value.detach().to(parameter.device, parameter.dtype)
        self._place_like(moved, parameter)
        return moved

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Load, and spread the state like the parameters."""
        super().load_optimizer(model, optimizer, state)
        for parameter, held in optimizer.state.items():
            for value in held.values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.device.type == "xla":
                    self._place_like(value, parameter)
        xla.sync()
