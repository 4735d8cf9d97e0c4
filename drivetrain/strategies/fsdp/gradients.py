"""The gradients of sharded models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.clipping import clip_grad_norm_over_meshes_, clip_grad_value_locally_
from drivetrain.strategies.fsdp.replicated import GradientAveraging
from drivetrain.strategies.gradients import Gradients, average_gradients, refuse_left_out_batch


class ShardedGradients(Gradients):
    """Gradients that backward reduces to the shards of each process.

    Args:
        rank: This process's rank, for errors.
        averaging: Of each prepared model, what averages the gradients of the parameters that stay whole.
        sync_each_batch: Whether gradients are reduced in every micro-batch.
    """

    def __init__(
        self,
        rank: int,
        averaging: Mapping[nn.Module, GradientAveraging] | None = None,
        sync_each_batch: bool = False,
    ) -> None:
        self._rank, self._sync_each_batch = rank, sync_each_batch
        self._averaging: Mapping[nn.Module, GradientAveraging] = {} if averaging is None else averaging
        self._beside: WeakKeyDictionary[Optimizer, tuple[int, list[nn.Parameter]]] = WeakKeyDictionary()

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        """Average the gradients of whole parameters that are trained or were added since the model was sharded."""
        for optimizer in optimizers:
            count = sum(len(group["params"]) for group in optimizer.param_groups)
            known = self._beside.get(optimizer)
            if known is None or known[0] != count:
                watched = self._watched()
                held = [each for group in optimizer.param_groups for each in group["params"]]
                beside = [each for each in held if not isinstance(each, DTensor) and id(each) not in watched]
                known = self._beside[optimizer] = (count, beside if any(map(_is_shard, held)) else [])
            average_gradients([parameter for parameter in known[1] if parameter.requires_grad])

    def _watched(self) -> set[int]:
        return {each for averaging in self._averaging.values() for each in averaging.watched}

    def require_complete(self, parameter: torch.Tensor) -> None:
        """Refuse a parameter that is neither sharded nor a part of the model when it was sharded."""
        known = isinstance(parameter, DTensor) or id(parameter) in self._watched()
        if not known and PartialState().use_distributed:
            raise ConfigurationError(
                f"A parameter of shape {tuple(parameter.shape)} is no part of the model that FSDP has sharded, so its "
                "gradient is averaged after the backward, but optimizer_in_backward=True steps within it. Make the "
                "parameter before fit(), as a part of the task, or leave optimizer_in_backward out.",
                code="DT-093",
            )

    def sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Keep gradients whole and unreduced in a context."""
        if enabled or self._sync_each_batch:
            return nullcontext()
        return _without_sync(sharding.sharded_units(model), self._averaging.get(model))

    def held(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """Gradients of an open window that are not in `.grad` yet."""
        return sharding.held_gradients(model)

    def discard(self, model: nn.Module) -> None:
        """Forget the gradients of an open window."""
        sharding.discard_held_gradients(model)

    def zero_loss(self, task: nn.Module) -> torch.Tensor:
        """Refuse: the peers' backward gathers over all processes, which only a backward can answer."""
        refuse_left_out_batch(task, self._rank)

    def adopt(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Let backwards reduce the gradients of parameters that were frozen when the model was sharded."""
        sharding.train_shards(model, parameters)

    def leaves(self, model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gathered parameters that the last forward has computed with; those that stay whole as they are."""
        return sharding.gathered_parameters(model, parameters)

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards."""
        return clip_grad_norm_over_meshes_(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every gradient to [-value, value]."""
        clip_grad_value_locally_(parameters, value)


def _is_shard(parameter: torch.Tensor) -> bool:
    """Whether a parameter is spread over processes with other data, not just over those of a layer."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names != ("tp",)


@contextmanager
def _without_sync(units: Sequence[FSDPModule], averaging: GradientAveraging | None) -> Iterator[None]:
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    if averaging is not None:
        averaging.enabled = False
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
        if averaging is not None:
            averaging.enabled = True
