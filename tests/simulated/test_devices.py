"""The simulated devices behave as devices do: limits, copies, streams, events, and the faults that they find."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.pool import run_in_processes
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
def normalises_batches() -> list[list[float]]:
    start(2)
    layers = [nn.BatchNorm1d(2), nn.BatchNorm1d(2).to("sim:0")]
    for layer in layers:
        layer(torch.tensor([[1.0, 2.0], [3.0, 6.0]], device=layer.weight.device))
        layer.eval()(torch.ones(2, 2, device=layer.weight.device))
    return [[*each.running_mean.tolist(), *each.running_var.tolist()] for each in layers]


def test_training_moves_running_statistics_and_evaluation_does_not():
    (found,) = runs.of(normalises_batches)
    assert found[1] == found[0]
    assert found[0][:2] == pytest.approx([0.2, 0.4])


@runs
def pickles() -> tuple[list[float], str]:
    start(2)
    read = pickle.loads(pickle.dumps(torch.arange(3.0, device="sim:1")))
    return read.tolist(), str(read.device)


def test_tensors_are_pickled_with_their_devices():
    assert runs.of(pickles) == [([0.0, 1.0, 2.0], "sim:1")]


@runs
def convolves() -> dict[str, float]:
    start(2)
    torch.manual_seed(0)
    found = {}
    for name, layer, shape in (
        ("plain", nn.Conv2d(3, 4, 3, padding=1), (2, 3, 8, 8)),
        ("transposed", nn.ConvTranspose1d(4, 2, 3, stride=2), (2, 4, 8)),
    ):
        image = torch.randn(shape)
        expected = layer(image)
        expected.square().sum().backward()
        gradient = layer.weight.grad.clone()
        layer.zero_grad()
        result = layer.to("sim:1")(image.to("sim:1"))
        result.square().sum().backward()
        found[f"output, {name}"] = float((result.cpu() - expected).abs().max())
        found[f"gradient, {name}"] = float((layer.weight.grad.cpu() - gradient).abs().max() / gradient.abs().max())
    with torch.no_grad():
        norm, image = nn.GroupNorm(2, 4), torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
        expected = norm(image)
        found["output, norm"] = float((norm.to("sim:1")(image.to("sim:1")).cpu() - expected).abs().max())
    return found


def test_convolutions_compute_and_train_as_on_the_cpu_and_norms_take_their_layout():
    (found,) = runs.of(convolves)
    assert len(found) == 5
    assert max(found.values()) < 1e-6


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
def has_the_statistics_of_cuda() -> dict[str, int]:
    sim = start(2)
    before = torch.sim.memory_stats("sim:1")
    held = [torch.ones(MB // 4, device="sim:1") for _ in range(3)]
    del held[0]
    with sim.capped(0, 3 * MB):
        try:
            torch.empty(MB, device="sim:1")
        except torch.OutOfMemoryError:
            held.append(torch.ones(MB // 4, device="sim:1"))
    after = torch.sim.memory_stats("sim:1")
    return {key: value - before[key] for key, value in after.items()}


def test_memory_has_the_statistics_of_cuda():
    (grown,) = runs.of(has_the_statistics_of_cuda)
    for name in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        assert grown[f"{name}.all.current"] == 3 * MB
        assert grown[f"{name}.all.allocated"] == 4 * MB
        assert grown[f"{name}.all.freed"] == MB
    assert [grown[f"allocation.all.{key}"] for key in ("current", "allocated", "freed")] == [3, 4, 1]
    assert grown["num_ooms"] == 1
    assert grown["num_alloc_retries"] == 0


def stays_unused_until_memory_is_given() -> tuple[bool, bool]:
    start(2)
    before = torch.sim.is_initialized()
    torch.ones(1, device="sim:1")
    return before, torch.sim.is_initialized()


def test_a_device_is_in_use_from_its_first_memory():
    assert run_in_processes(stays_unused_until_memory_is_given, 1) == [(False, True)]


@runs
def loads_weights_to_devices() -> tuple[dict[str, set[str]], list[tuple[int, ...]], str]:
    from safetensors.torch import load_file, save_file

    from drivetrain import OffloadedWeightsLoader, load_checkpoint_and_dispatch, load_checkpoint_in_model
    from drivetrain.inference import load_state_dict

    sim = start(2)
    weights = {"0.weight": torch.arange(12.0).reshape(3, 4), "1.weight": torch.ones(2, 3)}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.safetensors"
        save_file(weights, path)
        found, counted = {}, []

        def model(device: str) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)).to(device)

        def note(name: str, tensors: dict[str, torch.Tensor]) -> None:
            counted.append(tuple(sim.to_device))
            assert all(torch.equal(tensors[key].cpu(), weights[key]) for key in weights), name
            found[name] = {str(tensor.device) for tensor in tensors.values()}

        sim.reset_clock()
        note("dispatch", load_checkpoint_and_dispatch(model("meta"), path, {"": "sim:1"}).state_dict())
        target = model("sim:1")
        sim.reset_clock()
        load_checkpoint_in_model(target, path)
        note("in place", target.state_dict())
        index = {key: {"safetensors_file": path, "weight_name": key} for key in weights}
        loader = OffloadedWeightsLoader(save_folder=folder, index=index, device="sim:1")
        sim.reset_clock()
        note("on access", {key: loader[key] for key in weights})
        sim.reset_clock()
        note("read whole", load_state_dict(path, {"": "sim:1"}))
        try:
            load_file(path, device="sim:1")
        except Exception as error:
            return found, counted, str(error)
    return found, counted, ""


def test_weights_are_loaded_straight_to_a_device():
    ((found, counted, refused),) = runs.of(loads_weights_to_devices)
    assert found == {name: {"sim:1"} for name in ("dispatch", "in place", "on access", "read whole")}
    assert counted == [(2, 72)] * 4  # each weight is copied once
    assert "sim" in refused  # safetensors accepts only the names of devices that it knows


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


def ten_copies(pinned: bool = True, own_stream: bool = True, waits: bool = True) -> tuple[float, float, list[str]]:
    """Ten copies of 1 MB and kernels on them that take as long: seconds of the host and of all, and faults."""
    sim = start(2)
    host = torch.ones(MB // 4, pin_memory=pinned)
    buffers = [torch.empty(MB // 4, device="sim:0") for _ in range(10)]
    computing = torch.accelerator.current_stream()
    copying = torch.Stream("sim:0") if own_stream else computing
    sim.reset_clock(to_device=10 * MB)  # 0.1 s for each
    for buffer in buffers:
        event = torch.Event("sim")
        with copying:
            buffer.copy_(host, non_blocking=True)
            event.record(copying)
        if waits:
            computing.wait_event(event)
        buffer.add_(1)
        sim.spend(0.1, device=0)
    on_host = sim.now
    torch.accelerator.synchronize()
    return on_host, sim.now, sim.hazards


@runs
def on_a_stream_of_their_own() -> tuple[float, float, list[str]]:
    return ten_copies()


@runs
def on_the_stream_of_kernels() -> tuple[float, float, list[str]]:
    return ten_copies(own_stream=False)


@runs
def of_pageable_memory() -> tuple[float, float, list[str]]:
    return ten_copies(pinned=False)


@runs
def without_waiting() -> tuple[float, float, list[str]]:
    return ten_copies(waits=False)


@pytest.mark.parametrize(
    ("run", "on_host", "in_all"),
    [
        pytest.param(on_a_stream_of_their_own, 0.0, 1.1, id="on a stream of their own they overlap"),
        pytest.param(on_the_stream_of_kernels, 0.0, 2.0, id="on that of the kernels they do not"),
        pytest.param(of_pageable_memory, 1.0, 1.1, id="from pageable memory they hold up the host"),
    ],
)
def test_copies_take_time_beside_kernels(run: Callable[[], object], on_host: float, in_all: float):
    (found,) = runs.of(run)
    assert found[:2] == pytest.approx((on_host, in_all), abs=1e-6)
    assert found[2] == []


def test_reading_what_has_not_arrived_is_found():
    ((_, _, hazards),) = runs.of(without_waiting)
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
        torch.zeros(1, device="sim:0")  # may be given the same memory
        found.append(sim.hazards)
        torch.accelerator.synchronize()
    return found


def test_memory_that_another_stream_uses_is_neither_overwritten_nor_freed_unnoticed():
    ((overwritten, freed, recorded),) = runs.of(overwrites_and_frees)
    assert any("overwrites what stream" in each for each in overwritten)
    assert any("were freed while stream" in each for each in freed)
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
