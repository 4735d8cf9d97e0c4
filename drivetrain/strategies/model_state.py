"""`ModelState`: the state of a prepared model and its optimizers, under the names of the bare single-process model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.strategies.optimizer_names import named_optimizer_state, restore_optimizer_state
from drivetrain.strategies.topology import Topology

StateDict = dict[str, Any]


class ModelState:
    """The state of models that each process holds whole.

    Args:
        topology: This process's place.
        unwrap: Returns the user's own module inside what `prepare` returned.

    Attributes:
        reads_shards: Whether a checkpoint's tensors can be read straight into this process's shards.
    """

    reads_shards: bool = False

    def __init__(self, topology: Topology, unwrap: Callable[[nn.Module], nn.Module]) -> None:
        self.topology = topology
        self.unwrap = unwrap

    def model(self, model: nn.Module) -> StateDict:
        """Parameters and buffers under their canonical names, the same on all processes; call it on all."""
        return self.unwrap(model).state_dict()

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, and its groups."""
        return named_optimizer_state(self.unwrap(model), optimizer)

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Load what `model` returned under any strategy."""
        return self.unwrap(model).load_state_dict(state, strict=strict)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Load what `optimizer` returned under any strategy."""
        restore_optimizer_state(self.unwrap(model), optimizer, state)

    def optimizer_targets(self, model: nn.Module, saved: StateDict) -> StateDict:
        """Tensors that a saved optimizer state is to be read into, where `reads_shards`.

        Args:
            model: What `prepare` returned.
            saved: What `optimizer` returned under any strategy, its tensors on the meta device.
        """
        raise NotImplementedError

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0; an empty dict elsewhere."""
        return self._held(model) if self.topology.rank == 0 else {}

    def whole(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """As `full`, but on every process where each holds the model whole."""
        return self._held(model) if self.holds_whole else self.full(model)

    @property
    def holds_whole(self) -> bool:
        """Whether every process holds models whole."""
        return type(self).full is ModelState.full

    def _held(self, model: nn.Module) -> dict[str, torch.Tensor]:
        state = self.unwrap(model).state_dict()
        # A module's extra state may be anything.
        return {name: value.detach().cpu() for name, value in state.items() if isinstance(value, torch.Tensor)}

    def parameters_in_place(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters by name, or this process's shards of them: what is written to them is what the model computes.

        What was gathered for a forward is freed, so that the next one sees what was written.

        Args:
            model: What `prepare` returned.

        Raises:
            ConfigurationError: The strategy keeps weights elsewhere, so that these are copies.
        """
        return dict(self.unwrap(model).named_parameters())

    def original_type(self, module: nn.Module) -> type[nn.Module]:
        """The class that the user gave a module, where sharding it changed that."""
        return type(module)

    def describe(self, parameter: nn.Parameter) -> tuple[int, bool]:
        """How many elements the whole of a parameter has, wherever they are, and whether any process trains it."""
        return parameter.numel(), parameter.requires_grad


def with_buffers_of_rank_0(model: nn.Module, state: StateDict) -> StateDict:
    """A model's state with rank 0's buffers in it; call it on all processes.

    Buffers such as running means differ between processes until the next forward sends rank 0's to all, and a
    checkpoint may take each tensor from another process.

    Args:
        model: The bare model.
        state: Its state, which is changed.
    """
    for name, _ in model.named_buffers():
        if name in state:
            state[name] = broadcast(state[name].detach().clone())
    return state
