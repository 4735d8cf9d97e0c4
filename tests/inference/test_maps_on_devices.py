"""Device maps on simulated devices: what they prove is what running takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import dispatch_model, get_max_memory, infer_auto_device_map, resolve_device_map
from drivetrain.runtime.errors import DeviceNotAvailableError
from tests.shared_runs import SharedRuns
from tests.simulated.devices import Simulated, start
from tests.simulated.devices import simulated as simulated

pytestmark = pytest.mark.usefixtures("simulated")

runs = SharedRuns(__name__, world_size=1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(torch.relu(self.up(self.norm(value))))


def model_of_blocks(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), *(Block(width) for _ in range(6)), nn.Linear(width, 8))


def run_capped(sim: Simulated, memory: dict[Any, int], less: int = 0) -> dict[str, Any]:
    """A forward by a map, each device with as much memory as the map takes of it, or less."""
    example = torch.randn(64, 8)
    expected = model_of_blocks()(example)
    model = model_of_blocks()
    found = infer_auto_device_map(model, memory, example_args=(example,))
    taken = [int(share.limit - share.free) for device, share in found.shares.items() if isinstance(device, int)]
    with torch.no_grad(), sim.capped(*(each - less for each in taken)):
        dispatch_model(model, found)
        output = [model(example).cpu() for _ in range(2)][1]  # the first learns the order
        peaks = [sim.peak(device) for device in range(len(taken))]
    gap = float((output - expected).abs().max().detach())
    return {"devices": sorted(map(str, set(found.values()))), "taken": taken, "peaks": peaks, "gap": gap}


@runs
def splits() -> dict[str, Any]:
    return run_capped(start(2), {0: 170_000, 1: 220_000})


@runs
def streams() -> dict[str, Any]:
    return run_capped(start(2), {0: 190_000, "cpu": 1_000_000})


@runs
def lacks_memory() -> str:
    try:
        run_capped(start(2), {0: 170_000, 1: 220_000}, less=40_000)
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("run", "devices"), [(splits, ["0", "1"]), (streams, ["0", "cpu"])])
def test_a_model_runs_in_the_memory_that_its_map_proves(run: Any, devices: list[str]):
    (found,) = runs.of(run)
    assert found["devices"] == devices
    assert found["gap"] < 1e-5
    for peak, taken in zip(found["peaks"], found["taken"], strict=True):
        assert 0.8 * taken < peak <= taken  # as much as is needed, and not much more


def test_and_not_in_less():
    ((message),) = runs.of(lacks_memory)
    assert "out of memory" in message


@runs
def finds_devices() -> dict[str, Any]:
    sim = start(2)
    model = model_of_blocks()
    with sim.capped(100_000, 400_000):
        held = torch.empty(10_000, dtype=torch.uint8, device="sim:0")
        memory = get_max_memory()
        whole = resolve_device_map(model, "balanced", {**memory, 0: 400_000})
        try:
            refused = ""
            resolve_device_map(model, {"": 2})
        except DeviceNotAvailableError as error:
            refused = str(error)
        del held
    return {"memory": memory, "whole": whole.to_dict(), "named": resolve_device_map(model, "sim:1"), "refused": refused}


def test_devices_and_their_free_memory_are_found():
    (found,) = runs.of(finds_devices)
    assert {device: size for device, size in found["memory"].items() if device != "cpu"} == {0: 90_000, 1: 400_000}
    assert set(found["whole"].values()) == {0, 1}
    assert found["named"] == {"": "sim:1"}
    assert "on 2, which this machine does not have. Devices here: 0, 1, 'cpu', 'disk'" in found["refused"]
