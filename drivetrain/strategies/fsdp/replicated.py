"""Parameters that every process holds whole, beside those that are sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class GradientAveraging:
    """Averages the gradients of whole parameters over the processes, as DDP would.

    Args:
        mesh: Over whose dimensions they are averaged, one after another.

    Attributes:
        enabled: Whether backward averages; not within an accumulation window.
        watched: The `id` of the parameters whose gradients are averaged.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._count = mesh.size()
        self.enabled = True
        self.watched: set[int] = set()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average a parameter's gradient each time that a backward has finished it, also if it is frozen at first."""
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # torch computes no gradients of it
            is_trained = parameter.requires_grad
            self.watched.add(id(parameter))
            parameter.requires_grad_(True)  # torch adds the hook to no other, and keeps it when that changes
            parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)

    def _average(self, parameter: Tensor) -> None:
        if not self.enabled or parameter.grad is None:
            return
        # What earlier micro-batches left is this process's own, or an average already, which averaging keeps.
        with torch.no_grad():
            for group in self._groups:
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= self._count


def parameters_to_replicate(model: nn.Module, ignored: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Parameters that cannot be sharded, or shall not be.

    Args:
        model: The model.
        ignored: Modules that are left as they are.
    """
    chosen = {parameter for module in ignored for parameter in module.parameters()}
    # A scalar has no dimension to shard.
    return chosen | {parameter for parameter in model.parameters() if parameter.dim() == 0}
