"""Weights that are copied to devices as the forward needs them, on simulated devices that count bytes and time."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    StreamedModelError,
    StreamOptions,
    WeightStream,
    cpu_offload,
    disk_offload,
    dispatch_model,
    group_offload,
    load_checkpoint_and_dispatch,
)
from tests.inference.block_models import IDS, Block, empty, saved, seeded
from tests.shared_runs import SharedRuns

devices = pytest.importorskip("tests.simulated.devices", reason="needs the simulated devices of tests/simulated")
simulated, start = devices.simulated, devices.start
pytestmark = pytest.mark.usefixtures("simulated")

runs = SharedRuns(__name__, world_size=1)


def differs(model: nn.Module) -> float:
    """How far outputs are from those of the model in memory, of the largest; two forwards: the order is known then."""
    expected = seeded()(IDS)
    with torch.no_grad():
        return max(float((model(IDS) - expected).abs().max() / expected.abs().max()) for _ in range(2))


WAYS = {
    "memory": lambda folder: cpu_offload(seeded()),
    "disk": lambda folder: disk_offload(seeded(), folder / "off"),
    "a checkpoint": lambda folder: load_checkpoint_and_dispatch(
        empty(), saved(seeded(), folder / "m.safetensors"), "disk"
    ),
    "two blocks at once": lambda folder: group_offload(seeded(), num_blocks_per_group=2),
    "ahead": lambda folder: group_offload(seeded(), use_stream=True),
    "ahead, page-locked on the way": lambda folder: group_offload(seeded(), use_stream=True, low_cpu_mem_usage=True),
    "leaves": lambda folder: group_offload(seeded(), offload_type="leaf_level", use_stream=True),
    "a first part that stays": lambda folder: cpu_offload(seeded(), stream=StreamOptions(budget=4000)),
    "buffers too": lambda folder: cpu_offload(seeded(), offload_buffers=True),
    "over two devices": lambda folder: dispatch_model(
        seeded(),
        {"words": 0, "head": 0, "layers.0": 1, "layers.1": "cpu", "layers.2": "disk", "layers.3": 1, "norm": 0},
        offload_dir=folder / "off",
    ),
}


@runs
def each_way() -> dict[str, tuple[float, int, bool, bool]]:
    sim, found = start(2), {}
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = way(Path(folder))
            hook: Any = model._hf_hook
            far = differs(model)
            # Tensors of this backend itself cannot be copied so.
            apart = differs(copy.deepcopy(model)) if name == "buffers too" else 0.0
            tied = model.head.weight is model.words.weight
            at = hook.execution_device == torch.device("sim:0")
            found[name] = (max(far, apart), len(sim.hazards), tied, at)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_the_model_in_memory(way):
    (found,) = runs.of(each_way)
    far, hazards, tied, at = found[way]
    assert far < 1e-6
    assert hazards == 0
    assert tied
    assert at


@runs
def on_another_device_than_the_current_one() -> dict[str, Any]:
    sim, found = start(2), {}
    for name in ("sim:0", "sim:1"):
        model = group_offload(seeded(), onload_device=name, use_stream=True)
        sim.reset_clock(to_device=1e6, to_host=1e6, between=1e6, kernels=1e6)
        found[name] = (differs(model), sim.hazards)
    return found


def test_copies_are_waited_for_on_the_device_that_computes():
    (found,) = runs.of(on_another_device_than_the_current_one)
    for far, hazards in found.values():
        assert far < 1e-6
        assert hazards == []


@runs
def memory_and_places() -> dict[str, Any]:
    sim = start(2)
    model = nn.Sequential(*(Block(64) for _ in range(6)))
    block = sum(p.numel() * p.element_size() for p in model[0].parameters())
    x = torch.ones(1, 64)
    found: dict[str, Any] = {"block": block}
    for prefetch, limit in ((0, 0), (1, 0), ("none", int(1.9 * block))):
        with sim.capped(limit, 0):
            group_offload(model, use_stream=prefetch != 0)
            sim.reset_peak(0)
            with torch.no_grad():
                out = model(x)
        found[f"peak {prefetch}"] = sim.peak(0)
        found["output"] = out.device.type
        found["between calls"] = {p.device.type for p in model.parameters()}
        model._hf_hook.detach_hook(model)
    found["after"] = sim.used(0)
    group_offload(model, use_stream=True)
    with torch.no_grad():
        model(x)
        for number in (4, 1, 3, 0, 2, 5, 1, 4):  # each is followed by another one than the time before
            model[number](x)
    found["departed"] = sim.used(0)
    model._hf_hook.detach_hook(model)
    cpu_offload(model, stream=StreamOptions(budget=2 * block))
    with torch.no_grad():
        model(x)
        sim.reset_clock()
        model(x)
    found["copied"] = sim.to_device.bytes
    return found


def test_only_the_groups_in_use_are_on_the_device():
    (found,) = runs.of(memory_and_places)
    assert found["peak 0"] < 1.5 * found["block"]
    assert 1.5 * found["block"] < found["peak 1"] < 2.5 * found["block"]
    assert found["peak none"] < 1.5 * found["block"]
    assert found["departed"] < 2.5 * found["block"]
    assert found["between calls"] == {"cpu"}
    assert found["output"] == "cpu"
    assert found["after"] < found["block"]


def test_the_first_part_that_the_budget_holds_is_copied_once():
    (found,) = runs.of(memory_and_places)
    assert 4 * found["block"] <= found["copied"] < 4.2 * found["block"]


@runs
def overlap() -> dict[str, float]:
    sim = start(2)

    class Slow(nn.Module):
        """Computes as long as its weights take to arrive."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(512, 512, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sim.spend(0.1, device=0)
            return x + self.inner(x)

    def took(model: nn.Module) -> float:
        with torch.no_grad():
            model(torch.ones(1, 512))
            sim.reset_clock(to_device=512 * 512 * 4 / 0.1)
            model(torch.ones(1, 512))
            torch.accelerator.synchronize()
        model._hf_hook.detach_hook(model)
        return sim.now

    even = nn.Sequential(*(Slow() for _ in range(8)))
    found = {"in turn": took(group_offload(even)), "ahead": took(group_offload(even, use_stream=True))}
    found["cpu_offload"] = took(cpu_offload(even))
    with tempfile.TemporaryDirectory() as folder:
        found["disk_offload"] = took(disk_offload(even, folder))
    found["dispatch_model"] = took(dispatch_model(even, {"": "cpu"}, main_device=0))
    found["hazards"] = len(sim.hazards)
    return found


def test_copies_overlap_with_what_the_device_computes():
    (found,) = runs.of(overlap)
    assert found["in turn"] > 1.55  # eight copies of 0.1 s, and eight times 0.1 s of computing
    for way in ("ahead", "cpu_offload", "disk_offload", "dispatch_model"):
        assert found[way] < 1.05, way
    assert found["hazards"] == 0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("others", torch.zeros(10_000))  # pages of their own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


@runs
def refused_and_kept() -> dict[str, Any]:
    start(2)
    found: dict[str, Any] = {}
    model = cpu_offload(seeded())
    for name, move in {"away": lambda: model.to("sim:0"), "back": lambda: model.to("cpu")}.items():
        try:
            move()
        except StreamedModelError as error:
            found[name] = str(error)
    split = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    dispatch_model(split, {"0": 0, "1": 1})
    try:
        split.to("cpu")
    except StreamedModelError as error:
        found["split"] = str(error)
    found["same dtype"] = model.float() is model
    model.layers[1].up.weight.requires_grad_(True)
    try:
        model(IDS)
    except StreamedModelError as error:
        found["gradient"] = str(error)
    found["after a refusal"] = {p.device.type for p in model.parameters()}
    model._hf_hook.detach_hook(model)
    found["as before"] = torch.equal(model(IDS), seeded()(IDS))

    with tempfile.TemporaryDirectory() as folder:
        for name, counting in {
            "memory": cpu_offload(Counting(), offload_buffers=True),
            "disk": disk_offload(Counting(), folder, offload_buffers=True),
        }.items():
            found[f"counted in {name}"] = [float(counting(torch.zeros(1))) for _ in range(3)]

    streamed = seeded()
    stream = WeightStream(streamed, "sim:0")
    streamed.table = streamed.table.to("sim:0")
    low = torch.zeros(16, requires_grad=True, device="sim:0")
    streamed.norm.register_forward_pre_hook(lambda module, args: (args[0] + low,))
    streamed(IDS.to("sim:0")).sum().backward()
    reference = seeded()
    shift = torch.zeros(16, requires_grad=True)
    reference.norm.register_forward_pre_hook(lambda module, args: (args[0] + shift,))
    reference(IDS).sum().backward()
    found["beside"] = torch.allclose(low.grad.cpu(), shift.grad, atol=1e-6)
    stream.remove()
    found["removed"] = {p.device.type for p in streamed.parameters()}
    return found


def test_what_cannot_be_done_is_refused_and_leaves_the_model_as_it_was():
    (found,) = runs.of(refused_and_kept)
    assert "(cpu, sim:0)" in found["away"]
    assert "(cpu, sim:0)" in found["back"]
    assert "(sim:0, sim:1)" in found["split"]
    assert found["same dtype"]
    assert "weight in layers.1 requires a gradient" in found["gradient"]
    assert found["after a refusal"] == {"cpu"}
    assert found["as before"]


def test_buffers_that_the_forward_changes_are_kept():
    (found,) = runs.of(refused_and_kept)
    assert found["counted in memory"] == found["counted in disk"] == [1.0, 2.0, 3.0]


def test_weights_beside_them_are_trained():
    (found,) = runs.of(refused_and_kept)
    assert found["beside"]
    assert found["removed"] == {"cpu"}
