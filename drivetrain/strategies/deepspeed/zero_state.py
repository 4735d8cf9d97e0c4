"""The state of models that have an engine each; those without one are as in the base class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.deepspeed import whole_tensors
from drivetrain.strategies.deepspeed.engine import Engines
from drivetrain.strategies.model_state import ModelState, StateDict
from drivetrain.strategies.topology import Topology


class ZeroState(ModelState):
    """State that ZeRO spreads over processes, put together under the names of the bare model.

    Args:
        topology: This process's place.
        unwrap: Returns the user's own module inside what `prepare` returned.
        engines: The engines of all prepared models.
    """

    def __init__(self, topology: Topology, unwrap: Callable[[nn.Module], nn.Module], engines: Engines) -> None:
        super().__init__(topology, unwrap)
        self._engines = engines

    def describe(self, parameter: nn.Parameter) -> tuple[int, bool]:
        """As everywhere; of one that ZeRO-3 has partitioned, the size that DeepSpeed has noted."""
        elements, trained = super().describe(parameter)
        return getattr(parameter, "ds_numel", elements), trained

    def model(self, model: nn.Module) -> StateDict:
        """Parameters and buffers; in 32 bits where DeepSpeed keeps such master weights.

        What has to be put together from all processes is kept by one of them each, and stands as a tensor on the meta
        device on the others, so that no process ever holds all of it.
        """
        trained = self._engines.find(model)
        if trained is None:
            return super().model(model)
        return whole_tensors.read_model(trained, masters=True, holder=self._holds)

    def parameters_in_place(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Refuse for a model with an engine, which keeps master weights and partitions of its own."""
        if self._engines.find(model) is None:
            return super().parameters_in_place(model)
        raise ConfigurationError(
            "DeepSpeed keeps the weights that it trains in its engine, so they cannot be changed in place during a "
            'run. Use strategy="fsdp" to shard the model, or "ddp".',
            code="DT-050",
        )

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0; an empty dict elsewhere."""
        trained = self._engines.find(model)
        if trained is None:
            return super().full(model)
        first = self.topology.rank == 0
        return whole_tensors.read_model(trained, masters=False, holder=lambda _: first, whole=True)

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Load whole tensors by name into parameters and master weights."""
        trained = self._engines.find(model)
        if trained is None:
            return super().load_model(model, state, strict)
        return whole_tensors.write_model(trained, state, strict)

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, put together from all processes as in `model`."""
        return whole_tensors.read_optimizer(self._engines.stepped_by(optimizer), self._holds)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Give each process its part of what any strategy saved."""
        whole_tensors.write_optimizer(self._engines.stepped_by(optimizer), state)

    def _holds(self, number: int) -> bool:
        """Whether this process is the one that keeps a tensor which is put together for a checkpoint."""
        return number % self.topology.environment.world_size == self.topology.rank
