"""The simulated devices behave as devices do: limits, copies, streams, events, and the faults that they find."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.shared_runs import SharedRuns
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start

pytestmark = pytest.mark.usefixtures("simulated")

runs = SharedRuns(__name__, world_size=1)

MB = 1_000_000


@runs
def computes_and_trains() -> dict[str, float]:
    start(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    batch = torch.randn(5, 8)
    expected = model(batch)
    expected.sum().backward()
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    model[0].to("sim:0")
    model[2].to("sim:1")
    result = model[2](model[1](model[0](batch.to("sim:0"))).to("sim:1"))
    result.sum().backward()
    return {
        "output": float((result.cpu() - expected).abs().max()),
        "gradient": float((model[0].weight.grad.cpu() - gradient).abs().max()),
        "devices": torch.accelerator.device_count(),
    }


def test_a_model_over_two_devices_computes_and_trains_as_on_the_cpu():
    (found,) = runs.of(computes_and_trains)
    assert found["output"] < 1e-6
    assert found["gradient"] < 1e-6
    assert found["devices"] == 2


@runs
def counts_memory() -> dict[str, object]:
    sim = start(2)
    with sim.capped(3 * MB, 0):
        held = torch.ones(MB // 2, device="sim:0")
        del held
        held = torch.ones(MB // 4, device="sim:0")
        other = torch.ones(MB, device="sim:1")
        try:
            torch.empty(MB, device="sim:0")
            refused = ""
        except torch.OutOfMemoryError as error:
            refused = str(error)
        found = (sim.used(0), sim.peak(0), sim.used(1), torch.sim.mem_get_info(0))
        del held, other
        return {"found": found, "refused": refused, "after": sim.used(0)}


def test_memory_is_counted_by_device_and_a_limit_is_kept():
    (found,) = runs.of(counts_memory)
    assert found["found"] == (MB, 2 * MB, 4 * MB, (2 * MB, 3 * MB))
    assert "sim:0 out of memory: tried to allocate 4000000 bytes, with 1000000 of 3000000 in use" in found["refused"]
    assert found["after"] == 0


@runs
def counts_copies() -> list[tuple[int, int]]:
    sim = start(2)
    sim.reset_clock()
    there = torch.ones(1000).to("sim:0")
    across = (there * 2 + 1).to("sim:1")
    across.cpu()
    float(across.sum())
    return [tuple(sim.to_device), tuple(sim.between), tuple(sim.to_host)]


def test_copies_of_the_program_are_counted_and_those_of_kernels_are_not():
    assert runs.of(counts_copies) == [[(1, 4000), (1, 4000), (1, 4000)]]


def overlapping(pinned: bool, waits: bool = True) -> tuple[float, list[str]]:
    """Ten copies of 1 MB on a stream of their own, each beside a kernel that takes as long, and then used."""
    sim = start(2)
    host = torch.ones(MB // 4, pin_memory=pinned)
    buffers = [torch.empty(MB // 4, device="sim:0") for _ in range(10)]
    copying, computing = torch.Stream("sim:0"), torch.accelerator.current_stream()
    sim.reset_clock(to_device=10 * MB)  # 0.1 s for each
    for buffer in buffers:
        event = torch.Event("sim")
        with copying:
            buffer.copy_(host, non_blocking=True)
            event.record(copying)
        sim.spend(0.1, device=0)
        if waits:
            computing.wait_event(event)
        buffer.add_(1)
    torch.accelerator.synchronize()
    return sim.now, sim.hazards


@runs
def overlaps() -> tuple[float, list[str]]:
    return overlapping(pinned=True)


@runs
def copies_pageable_memory() -> tuple[float, list[str]]:
    return overlapping(pinned=False)


@runs
def does_not_wait() -> tuple[float, list[str]]:
    return overlapping(pinned=True, waits=False)


def test_copies_from_pinned_memory_overlap_with_kernels_and_others_do_not():
    ((seconds, hazards),) = runs.of(overlaps)
    assert seconds == pytest.approx(1.0, rel=0.01)
    assert hazards == []
    ((seconds, hazards),) = runs.of(copies_pageable_memory)
    assert seconds > 1.9
    assert hazards == []


def test_reading_what_has_not_arrived_is_found():
    ((_, hazards),) = runs.of(does_not_wait)
    assert any("still writes" in each for each in hazards)


@runs
def overwrites_and_frees() -> list[list[str]]:
    sim = start(2)
    host = torch.ones(MB // 4, pin_memory=True)
    found = []
    for wrong in ("overwritten", "freed", "recorded"):
        buffer = torch.empty(MB // 4, device="sim:0")
        copying = torch.Stream("sim:0")
        sim.reset_clock(to_device=10 * MB, kernels=1 * MB)
        with copying:
            buffer.copy_(host, non_blocking=True)
        if wrong == "overwritten":
            buffer.mul_(2)
            copying.synchronize()
        if wrong == "recorded":
            buffer.record_stream(copying)
        del buffer
        found.append(sim.hazards)
        torch.accelerator.synchronize()
    return found


def test_memory_that_another_stream_uses_is_neither_overwritten_nor_freed_unnoticed():
    ((overwritten, freed, recorded),) = runs.of(overwrites_and_frees)
    assert any("overwrites what stream" in each for each in overwritten)
    assert any("freed while stream" in each for each in freed)
    assert recorded == []


@runs
def times_events() -> tuple[float, bool, bool]:
    sim = start(2)
    sim.reset_clock()
    first, last = (torch.Event("sim", enable_timing=True) for _ in range(2))
    first.record()
    sim.spend(0.5, device=0)
    last.record()
    early = last.query()
    last.synchronize()
    return first.elapsed_time(last), early, last.query()


def test_events_have_times():
    ((elapsed, early, late),) = runs.of(times_events)
    assert elapsed == pytest.approx(500)
    assert (early, late) == (False, True)


@runs
def known_to_drivetrain() -> tuple[str, bool, int, int]:
    from drivetrain.runtime.devices import detect_device_kind

    sim = start(2)
    kind = detect_device_kind()
    with sim.capped(MB, MB):
        free = kind.free_memory(torch.device("sim:1"))
    return kind.name, kind.supports_streams, kind.count(), free[0]


def test_drivetrain_takes_them_for_what_this_machine_has():
    assert runs.of(known_to_drivetrain) == [("sim", True, 2, MB)]
