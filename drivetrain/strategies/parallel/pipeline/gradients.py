"""The gradients of a model that is spread over stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.fsdp.clipping import scale_by_norm_, total_norm_over_meshes
from drivetrain.strategies.fsdp.gradients import ShardedGradients


class StagedGradients(ShardedGradients):
    """Gradients whose norm is that over all stages.

    Args:
        rank: This process's rank, for errors.
        group: The processes of the pipeline.
        device: Where tensors are exchanged.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(rank)
        self._group, self._device = group, device
        self._held: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        """Leave gradients as they are: processes of other stages have other parameters.

        Raises:
            ConfigurationError: An optimizer has more parameters than at its first step.
        """
        for optimizer in optimizers:
            count = sum(len(group["params"]) for group in optimizer.param_groups)
            if count > self._held.setdefault(optimizer, count):
                _refuse_added()

    def adopt(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse: what the stages send each other is settled when the model is split."""
        _refuse_added()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards and stages."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = self._over_stages(total_norm_over_meshes(gradients, norm_type), norm_type)
        with torch.no_grad():
            scale_by_norm_(gradients, total, max_norm)
        return total

    def _over_stages(self, norm: Tensor, norm_type: float) -> Tensor:
        """The norm of the gradients of all stages together, from that of this process's."""
        # In one dtype on all, also on a process without any gradients, which has none to take it from.
        power = norm.detach().to(self._device, torch.float64)
        if norm_type == float("inf"):
            dist.all_reduce(power, op=dist.ReduceOp.MAX, group=self._group)
            return power
        power = power**norm_type
        dist.all_reduce(power, group=self._group)
        return power ** (1.0 / norm_type)


def _refuse_added() -> NoReturn:
    raise ConfigurationError(
        "A pipeline settles which parameters it trains when the model is split, so none can be added later. Train "
        'all from the start, or use strategy="fsdp".',
        code="DT-049",
    )
