"""Putting shards together, whatever way they were cut."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from drivetrain import PartialState
from drivetrain.strategies.fsdp.sharding import gather
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded


def gathered() -> list[str]:
    """What differs from the tensor that was cut, and what torch warned of."""
    PartialState(cpu=True)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.tensor").addHandler(handler)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    whole = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    wrong: list[str] = []
    cuts: list[list[Placement]] = [
        [Shard(0), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(1), Replicate()],
        [Replicate(), Replicate()],
    ]
    for placements in cuts:
        if not torch.equal(gather(distribute_tensor(whole, mesh, placements)), whole):
            wrong.append(str(placements))
    halves = DTensor.from_local(whole / 2, mesh, [Partial(), Replicate()])
    if not torch.equal(gather(halves), whole):
        wrong.append("partial sums")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    for name, value in model.state_dict().items():
        if not torch.equal(gather(value), expected[name]):
            wrong.append(name)
    if gather(whole) is not whole:
        wrong.append("what is whole")
    dist.barrier()
    return wrong + warnings


@pytest.mark.filterwarnings("error")
def test_every_cut_is_gathered_without_a_warning() -> None:
    assert run_in_processes(gathered, 4, timeout=60) == [[], [], [], []]
