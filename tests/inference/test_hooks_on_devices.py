"""Hooks that move weights and inputs between devices, on simulated ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    AlignDevicesHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_layerwise_casting_hooks,
    cpu_offload_with_hook,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from tests.shared_runs import SharedRuns

devices = pytest.importorskip("tests.simulated.devices", reason="tests.simulated is missing")
simulated = devices.simulated
pytestmark = pytest.mark.usefixtures("simulated")

runs = SharedRuns(__name__, world_size=1)

WIDTH = 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@runs
def over_two_devices() -> dict[str, Any]:
    devices.start(2)
    model = layers()
    expected = model(X)
    placed = {"0": "sim:0", "1": "sim:0", "2": "sim:1", "3": "sim:1"}
    attach_align_device_hook_on_blocks(model, placed, offload=dict.fromkeys(placed, False))
    output = model(X)
    inner = model[3](model[2](X))
    output.sum().backward()
    return {
        "equal": torch.equal(output, expected),
        "output": str(output.device),
        "inner": str(inner.device),
        "weights": [str(layer.weight.device) for layer in model],
        "trained": all(layer.weight.grad is not None for layer in model),
    }


def test_a_model_over_two_devices_gives_its_output_where_the_input_was():
    (found,) = runs.of(over_two_devices)
    assert found == {
        "equal": True,
        "output": "cpu",
        "inner": "sim:1",
        "weights": ["sim:0", "sim:0", "sim:1", "sim:1"],
        "trained": True,
    }


@runs
def offloaded() -> dict[str, Any]:
    sim = devices.start(2)
    model = layers(6)
    with torch.no_grad():
        expected = model(X)
        attach_align_device_hook(model, "sim:0", offload=True)
        before = sim.used(0)
        sim.reset_peak(0)
        output = model(X)
    during, after = sim.peak(0) - before, sim.used(0) - before
    remove_hook_from_submodules(model)
    return {
        "equal": torch.equal(output.cpu(), expected),
        "peak": during,
        "after": after - output.numel() * 4,
        "back": {str(parameter.device) for parameter in model.parameters()},
    }


def test_one_offloaded_layer_at_a_time_is_on_the_device():
    (found,) = runs.of(offloaded)
    assert found["equal"]
    assert LAYER <= found["peak"] < 1.3 * LAYER
    assert found["after"] == 0
    assert found["back"] == {"cpu"}


@runs
def tied() -> list[Any]:
    sim = devices.start(2)
    weight, used = 4 * WIDTH * WIDTH, list[Any]()
    for attach in (
        lambda model: add_hook_to_module(model, AlignDevicesHook("sim:0", place_submodules=True)),
        lambda model: attach_align_device_hook(model, "sim:0"),
    ):
        before = sim.used(0)
        model = Tied()
        attach(model)
        used += [(sim.used(0) - before) / weight, model.first.weight is model.last.weight]
        del model
    model = Tied()
    attach_align_device_hook(model, "sim:0", offload=True, preload_module_classes=["Tied"])
    sim.reset_clock()
    with torch.no_grad():
        model(X.to("sim:0"))
    used.append((sim.to_device.bytes - X.numel() * 4) / weight)
    return used


def test_a_tied_weight_is_on_a_device_once_and_is_copied_once():
    assert runs.of(tied) == [[1, True, 1, True, 1]]


@runs
def in_turn() -> list[tuple[int, int]]:
    sim = devices.start(2)
    first, first_hook = cpu_offload_with_hook(layers(), "sim:0")
    second, second_hook = cpu_offload_with_hook(layers(), "sim:0", prev_module_hook=first_hook)
    start, seen = sim.used(0), list[tuple[int, int]]()

    def look() -> None:
        seen.append((round((sim.used(0) - start) / (4 * LAYER)), int(next(second.parameters()).device.type == "sim")))

    look()
    with torch.no_grad():  # a graph would keep the weights
        hidden = first(X)
        look()
        for _ in range(2):
            second(hidden)
            look()
        sim.reset_clock()
        second(hidden)
        seen.append((sim.to_device.count, 0))
    second_hook.offload()
    look()
    return seen


def test_models_take_turns_on_a_device():
    # One of the two at a time, and one that is there is not moved again.
    assert runs.of(in_turn) == [[(0, 0), (1, 0), (1, 1), (1, 1), (0, 0), (0, 0)]]


@runs
def single_tensors() -> list[Any]:
    devices.start(2)
    layer = nn.Linear(WIDTH, WIDTH)
    values = layer.weight.detach().clone()
    found: list[Any] = []
    for device in ("sim:0", "sim:1", "meta"):
        set_module_tensor_to_device(layer, "weight", device)
        found.append(str(layer.weight.device))
    set_module_tensor_to_device(layer, "weight", "sim:1", value=values, dtype="float16")
    return [*found, torch.equal(layer.weight.cpu(), values.half()), type(layer.weight).__name__]


def test_a_tensor_goes_from_device_to_device():
    assert runs.of(single_tensors) == [["sim:0", "sim:1", "meta", True, "Parameter"]]


@runs
def cast_and_offloaded() -> tuple[bool, int]:
    sim = devices.start(2)
    model, plain = layers().to(torch.bfloat16), layers().to(torch.bfloat16)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.float8_e4m3fn).to(torch.bfloat16)
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16)
    attach_align_device_hook(model, "sim:0", offload=True)
    x = X.bfloat16()
    with torch.no_grad():
        expected = plain(x)
        sim.reset_clock()
        outputs = [model(x).cpu() for _ in range(2)]
    return all(torch.equal(output, expected) for output in outputs), sim.to_device.bytes


def test_small_weights_come_to_the_device():
    ((equal, copied),) = runs.of(cast_and_offloaded)
    assert equal
    assert copied == 2 * (4 * LAYER // 4 + 2 * X.numel())  # a byte for each weight, and two for each input
