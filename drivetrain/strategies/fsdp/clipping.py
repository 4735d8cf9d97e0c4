"""Clipping gradients that may be plain tensors and shards over several meshes at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


@torch.no_grad()
def clip_grad_norm_over_meshes_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients down to a total norm of at most `max_norm`; call it on all processes.

    Torch's own function refuses gradients on two meshes, and lists that mix plain tensors with sharded ones (torch
    2.13). Here the gradients are grouped by mesh and placements; each group's norm is combined over the dimensions
    that it is sharded in, and then those of the groups.

    Args:
        parameters: Parameters whose gradients are plain tensors, equal on all processes, or DTensors on any mesh.
        max_norm: The largest norm allowed.
        norm_type: The p of the p-norm; infinity for the largest absolute value.

    Returns:
        The total norm before clipping, a plain scalar tensor, the same on all processes.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = total_norm_over_meshes(gradients, norm_type)
    scale_by_norm_(gradients, total, max_norm)
    return total


@torch.no_grad()
def total_norm_over_meshes(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as if they were one vector; call it on all processes.

    Args:
        gradients: Plain tensors, equal on all processes, or DTensors on any mesh.
        norm_type: The p of the p-norm.
    """
    norm_type = float(norm_type)
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        group, local = _locally(gradient)
        groups.setdefault(group, []).append(local)
    powers = [_power_of_group(group, locals_, norm_type) for group, locals_ in groups.items()]
    if not powers:
        return torch.zeros(())
    widest = torch.float64 if any(power.dtype == torch.float64 for power in powers) else torch.float32
    combined = torch.stack([power.to(powers[0].device, widest) for power in powers])
    return combined.max() if math.isinf(norm_type) else combined.sum() ** (1.0 / norm_type)


@torch.no_grad()
def scale_by_norm_(gradients: list[Tensor], total: Tensor, max_norm: float) -> None:
    """Multiply gradients by what brings their norm, `total`, down to `max_norm`; by one where it is below."""
    if not gradients or math.isinf(max_norm):
        return
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for device, locals_ in _local_parts(gradients).items():
        torch._foreach_mul_(locals_, factor.to(device))


@torch.no_grad()
def clip_grad_value_locally_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient to [-clip_value, clip_value], each process its own shards."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for locals_ in _local_parts(gradients).values():
        torch._foreach_clamp_min_(locals_, -clip_value)
        torch._foreach_clamp_max_(locals_, clip_value)


def _local_parts(gradients: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """What this process holds of gradients, by device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_device.setdefault(local.device, []).append(local)
    return by_device


def _locally(gradient: Tensor) -> tuple[tuple[DeviceMesh, tuple[int, ...]] | None, Tensor]:
    """A gradient's local part, and its mesh with the dimensions over which parts differ; None where it is whole."""
    if not isinstance(gradient, DTensor):
        return None, gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    split = tuple(i for i, p in enumerate(gradient.placements) if not isinstance(p, Replicate))
    return ((gradient.device_mesh, split) if split else None), gradient.to_local()


def _power_of_group(group: tuple[DeviceMesh, tuple[int, ...]] | None, locals_: list[Tensor], p: float) -> Tensor:
    """The sum of |g|^p over a group, or the largest |g| for p = infinity, combined over its shards."""
    held = [each for each in locals_ if each.numel()]
    device = locals_[0].device
    # The same on all processes, also where one holds nothing of any.
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in locals_) else torch.float32
    if held:
        norms = torch.stack([norm.to(device, dtype) for norm in torch._foreach_norm(held, p)])
        power = norms.max() if math.isinf(p) else (norms**p).sum()
    else:
        power = torch.zeros((), device=device, dtype=dtype)
    if group is None:
        return power
    mesh, split = group
    if power.device.type != mesh.device_type:  # offloaded shards: the mesh talks on its own device
        power = power.to(mesh.device_type)
    for dimension in split:
        if mesh.size(dimension) > 1:
            operation = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
            dist.all_reduce(power, op=operation, group=mesh.get_group(dimension))
    return power
