"""Looking at whole parameters for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain.strategies.fsdp.parameters import gather, local_slices, slots_of


@contextmanager
def whole_parameters(model: nn.Module, writeback: bool) -> Iterator[None]:
    """Let a model's parameters be whole tensors in the body, on every process; call it on all.

    They are in full precision, and the model cannot be called meanwhile.

    Args:
        model: The model.
        writeback: Whether what the body does to them is kept: each process keeps its shard of its own copy.
    """
    slots = [slot for slot in slots_of(model) if isinstance(slot.parameter, DTensor)]
    whole: dict[int, nn.Parameter] = {}
    for module, name, shard in slots:
        if id(shard) not in whole:
            gathered = gather(shard.detach())
            whole[id(shard)] = nn.Parameter(gathered, requires_grad=shard.requires_grad)
        module._parameters[name] = whole[id(shard)]
    try:
        yield
        if writeback:
            with torch.no_grad():
                for shard in {id(slot.parameter): slot.parameter for slot in slots}.values():
                    assert isinstance(shard, DTensor)
                    shard.to_local().copy_(whole[id(shard)][local_slices(shard)])
    finally:
        for module, name, shard in slots:
            module._parameters[name] = shard
