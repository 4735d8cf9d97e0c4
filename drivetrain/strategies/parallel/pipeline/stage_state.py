"""The state of a model that is spread over stages, under the names of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.strategies.fsdp.sharded_state import ShardedState
from drivetrain.strategies.model_state import StateDict
from drivetrain.strategies.parallel.pipeline.split_model import SplitModel
from drivetrain.strategies.topology import Topology


class StagedState(ShardedState):
    """The state of all stages.

    Args:
        topology: This process's place.
        unwrap: Returns the user's own module inside what `prepare` returned.
        find: Returns the model that is split.
    """

    def __init__(
        self, topology: Topology, unwrap: Callable[[nn.Module], nn.Module], find: Callable[[], SplitModel]
    ) -> None:
        super().__init__(topology, unwrap)
        self._find = find

    def model(self, model: nn.Module) -> StateDict:
        """Parts of the parameters under canonical names, those that a peer holds on the meta device."""
        self.reshard(model)
        return self._find().holdings.model_state()

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state over all stages, its tensors sharded as the parameters are."""
        return self._find().holdings.optimizer_state(optimizer, super().optimizer(model, optimizer))

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Take this process's parts of what `model` returned under any strategy."""
        return super().load_model(model, self._find().holdings.own_model_state(state), strict)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Take this process's parts of what `optimizer` returned under any strategy."""
        super().load_optimizer(model, optimizer, self._find().holdings.own_optimizer_state(state))

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0; an empty dict elsewhere."""
        self.reshard(model)
        return self._find().holdings.full_state_dict()

    def describe(self, parameter: nn.Parameter) -> tuple[int, bool]:
        """As everywhere; what stands for a parameter of another stage is trained where that one is."""
        elements, trained = super().describe(parameter)
        return elements, trained or self._find().holdings.is_trained_by_peer(parameter)

    def reshard(self, model: nn.Module) -> None:
        """Free whatever is gathered at the moment in this process's stages."""
        split = self._find()
        for module in split.modules:
            super().reshard(module)
        split.put_back()
