"""State dicts of sharded models, by the names and shapes of the unwrapped model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.strategies.base import HeldAs, ModelState, StateDict, with_buffers_of_rank_0
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.materialise import load_weights
from drivetrain.strategies.fsdp.sharding import gather, shard_like, whole_parameters


class ShardedState(ModelState):
    held_as: HeldAs = "shards"

    def parameters_in_place(self, model: nn.Module) -> dict[str, nn.Parameter]:
        self.reshard(model)
        return super().parameters_in_place(model)

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        self.reshard(model)
        bare = self.strategy.unwrap(model)
        state = bare.state_dict()
        if self.strategy.topology.environment.is_distributed:
            state = with_buffers_of_rank_0(bare, state)
        return self._full(state) if full else state

    def _full(self, state: StateDict) -> StateDict:
        whole: StateDict = {}
        for name, value in state.items():
            gathered = gather(value) if isinstance(value, torch.Tensor) else value
            if self.strategy.topology.rank == 0:
                whole[name] = gathered.detach().cpu() if isinstance(gathered, torch.Tensor) else gathered
        return whole

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        self.reshard(model)
        return super().load_model(model, state, strict)

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        self.reshard(model)
        return super().optimizer(model, optimizer)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        self.reshard(model)
        parameters = dict(self.strategy.unwrap(model).named_parameters())
        shards = {
            name: {key: _like(value, parameters.get(name)) for key, value in saved.items()}
            for name, saved in state["state"].items()
        }
        super().load_optimizer(model, optimizer, {**state, "state": shards})

    @contextmanager
    def summoned(self, model: nn.Module, writeback: bool = False) -> Iterator[nn.Module]:
        # The unwrapped model, which cannot run a forward pass here. With `writeback`, changes are copied to the shards
        # on exit.
        self.reshard(model)
        bare = self.strategy.unwrap(model)
        with whole_parameters(bare, writeback):
            yield bare

    def load_weights(self, model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Load weights into a prepared model. Each process reads only its shards."""
        self.reshard(model)
        load_weights(self.strategy.unwrap(model), path, strict)

    def reshard(self, model: nn.Module) -> None:
        """Free the full parameters that FSDP has gathered."""
        sharding.reshard_units(model)


def _like(value: Any, parameter: torch.Tensor | None) -> Any:
    # State of another shape, such as a step count, is not sharded.
    if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return shard_like(value, parameter)
    return value
