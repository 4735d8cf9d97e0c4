"""Copies of tensors that are spread over devices, part by part."""

from __future__ import annotations

import importlib

import torch

from drivetrain.strategies.xla.mesh import DeviceMesh


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A whole copy of a tensor on the CPU, put together from the parts that the devices hold.

    `Tensor.cpu()` compiles and runs a program that gathers a spread tensor on each device, and does so in every call
    (torch_xla 2.9). Here each part is transferred as it is, and nothing is compiled.

    Args:
        tensor: On an XLA device or not; what is recorded for it has run.
    """
    bare = tensor.detach()
    if tensor.device.type != "xla" or not DeviceMesh.is_spread(tensor):
        return bare.cpu()
    sharded = importlib.import_module("torch_xla.distributed.spmd").XLAShardedTensor
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for part in sharded(tensor).local_shards:
        if part.replica_id == 0:
            # What is beyond the tensor's end is padding, which makes all parts of one size.
            own = tuple(slice(0, place.stop - place.start) for place in part.indices)
            whole[tuple(part.indices)] = part.data[own]
    return whole
