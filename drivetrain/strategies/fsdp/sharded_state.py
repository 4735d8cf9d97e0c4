"""The state of divided models under the names and in the shapes of the bare ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.strategies.base import StateDict, Strategy
from drivetrain.strategies.fsdp import dividing
from drivetrain.strategies.fsdp.parameters import gather, shard_like
from drivetrain.strategies.fsdp.summoning import whole_parameters


class ShardedState(Strategy):
    """The part of `FSDP` that saves, loads and shows state."""

    def own_type(self, module: nn.Module) -> type[nn.Module]:
        """The class that `fully_shard` derived a module's class from."""
        if not isinstance(module, FSDPModule):
            return type(module)
        own: type[nn.Module] = type(module).__bases__[1]
        return own

    def model_state(self, model: nn.Module) -> StateDict:
        """Shards of the parameters, and rank 0's buffers, under canonical names."""
        self.reshard(model)
        bare = self.unwrap(model)
        state = bare.state_dict()
        if self.environment.is_distributed:
            for name, _ in bare.named_buffers():
                if name in state:
                    state[name] = broadcast(state[name].detach().clone())
        return state

    def load_model_state(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Take this process's shards of what `model_state` returned under any strategy."""
        self.reshard(model)
        return super().load_model_state(model, state, strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, its tensors divided as the parameters are."""
        self.reshard(model)
        return super().optimizer_state(model, optimizer)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Take this process's shards of what `optimizer_state` returned under any strategy."""
        self.reshard(model)
        parameters = dict(self.unwrap(model).named_parameters())
        shards = {
            name: {key: _like(value, parameters.get(name)) for key, value in saved.items()}
            for name, saved in state["state"].items()
        }
        super().load_optimizer_state(model, optimizer, {**state, "state": shards})

    def optimizer_targets(self, model: nn.Module, saved: StateDict) -> StateDict:
        """Tensors that a saved optimizer state is read into: shards like those of the parameters."""
        self.reshard(model)
        parameters = dict(self.unwrap(model).named_parameters())
        return {
            "state": {
                name: {key: _target(value, parameters.get(name)) for key, value in values.items()}
                for name, values in saved["state"].items()
            },
            "param_groups": [
                {key: _target(value, None) for key, value in group.items()} for group in saved["param_groups"]
            ],
        }

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0, gathered one by one; an empty dict elsewhere."""
        whole: dict[str, torch.Tensor] = {}
        for name, value in self.model_state(model).items():
            gathered = gather(value) if isinstance(value, torch.Tensor) else value
            if self.environment.rank == 0:
                whole[name] = gathered.detach().cpu() if isinstance(gathered, torch.Tensor) else gathered
        return whole

    @contextmanager
    def summoned(self, model: nn.Module, writeback: bool = False) -> Iterator[nn.Module]:
        """Let a model's parameters be whole tensors in the body, in full precision; call it on all processes.

        The model cannot be called meanwhile.

        Args:
            model: what `prepare` returned.
            writeback: whether what the body does to the parameters is kept.

        Yields:
            The user's own module.
        """
        self.reshard(model)
        bare = self.unwrap(model)
        with whole_parameters(bare, writeback):
            yield bare

    def reshard(self, model: nn.Module) -> None:
        """Free whatever is gathered at the moment, so that the model's parameters are its shards."""
        dividing.free_gathered(model)


def _like(value: Any, parameter: torch.Tensor | None) -> Any:
    """An optimizer's saved value as it belongs to a parameter: divided alike where it is of its shape."""
    if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return shard_like(value, parameter)
    return value


def _target(described: Any, parameter: torch.Tensor | None) -> Any:
    """Memory for a saved value: a shard where it belongs to one."""
    if not isinstance(described, torch.Tensor):
        return described
    if isinstance(parameter, DTensor) and described.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=described.dtype, requires_grad=False)
    return torch.empty(described.shape, dtype=described.dtype)
