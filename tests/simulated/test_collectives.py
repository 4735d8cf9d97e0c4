"""Collectives of simulated devices: what they compute, the time that they take, and the differences that they find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain import PartialState
from tests.pool import DEVICE, ProcessesFailed, run_in_processes
from tests.simulated.collectives import network
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start

pytestmark = pytest.mark.usefixtures("simulated")
ON_SIM = {DEVICE: "sim"}


def all_of_them() -> dict[str, Any]:
    device = PartialState().device
    rank = dist.get_rank()
    own = torch.tensor([1.0, 2.0], device=device) + rank
    found: dict[str, Any] = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("mean", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX)):
        value = own.clone()
        dist.all_reduce(value, op)
        found[name] = value.tolist()
    value = own.clone()
    dist.broadcast(value, 1)
    found["broadcast"] = value.tolist()
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    found["gathered"] = torch.cat(gathered).tolist()
    whole = torch.empty(4, device=device)
    dist.all_gather_into_tensor(whole, own)
    found["gathered into one"] = whole.tolist()
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device=device))
    found["scattered"] = part.tolist()
    swapped = torch.empty(2, device=device)
    dist.all_to_all_single(swapped, own)
    found["swapped"] = swapped.tolist()
    if rank == 0:
        dist.send(own, 1)
    else:
        dist.recv(own, 0)
    found["sent"] = own.tolist()
    return found


def test_they_compute_what_collectives_compute() -> None:
    first, second = run_in_processes(all_of_them, 2, env=ON_SIM, timeout=150)
    both = {
        "sum": [3.0, 5.0],
        "mean": [1.5, 2.5],
        "max": [2.0, 3.0],
        "broadcast": [2.0, 3.0],
        "gathered": [1.0, 2.0, 2.0, 3.0],
        "gathered into one": [1.0, 2.0, 2.0, 3.0],
        "sent": [1.0, 2.0],
    }
    assert first == {**both, "scattered": [0.0, 2.0], "swapped": [1.0, 2.0]}
    assert second == {**both, "scattered": [4.0, 6.0], "swapped": [2.0, 3.0]}


def timed(waits: bool) -> tuple[float, float, float, list[str]]:
    """An all-reduce of 4 MB at 10 MB/s beside a kernel of 0.3 s: seconds of the host and in all, exposed, hazards."""
    sim = start(2)
    device = PartialState().device
    value = torch.ones(1_000_000, device=device)
    network.bandwidth, network.latency = 1e7, 0.1
    sim.reset_clock()
    network.calls.clear()
    work = dist.all_reduce(value, async_op=True)
    sim.spend(0.3, device=device.index)
    if waits:
        work.wait()
    value.add_(1)
    on_host = sim.now
    torch.accelerator.synchronize()
    return on_host, sim.now, network.calls[0].waited, sim.hazards


def test_they_run_beside_kernels_and_the_host_does_not_wait() -> None:
    for on_host, in_all, exposed, hazards in run_in_processes(timed, 2, args=(True,), env=ON_SIM, timeout=150):
        assert on_host == 0.0
        assert in_all == pytest.approx(0.5)
        assert exposed == pytest.approx(0.2)
        assert hazards == []


def test_a_result_that_was_not_waited_for_is_a_hazard() -> None:
    for *_, hazards in run_in_processes(timed, 2, args=(False,), env=ON_SIM, timeout=150):
        assert any("still writes" in each or "still reads" in each for each in hazards)


def differing(what: str) -> None:
    state = PartialState()
    value = torch.ones(2, device="sim:0" if what == "device" else state.device)
    if what == "operation" and state.process_index:
        dist.broadcast(value, 0)
    elif what == "shape" and state.process_index:
        dist.all_reduce(torch.ones(3, device=state.device))
    else:
        dist.all_reduce(value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("operation", r"different collectives: rank 0: allreduce of 2 .*rank 1: broadcast of 2"),
        ("shape", r"different collectives: rank 0: allreduce of 2 .*rank 1: allreduce of 3"),
        ("device", r"same device: rank 0: allreduce.* on sim:0, rank 1: allreduce.* on sim:0"),
    ],
)
def test_ranks_that_differ_are_named(what: str, message: str) -> None:
    with pytest.raises(ProcessesFailed, match=message):
        run_in_processes(differing, 2, args=(what,), env=ON_SIM, timeout=150)
