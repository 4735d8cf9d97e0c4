"""Device maps on simulated devices: what they prove is what running takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    ConfigurationError,
    DeviceNotAvailableError,
    dispatch_model,
    get_max_memory,
    infer_auto_device_map,
    resolve_device_map,
)
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


class Noting(nn.Module):
    """Two layers, of which the second notes where its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.seen: list[str] = []
        self.second.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.seen = [str(args[0].device), str(kwargs["cache"].device)]
        return args, {}

    def forward(self, value: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(value), cache=cache)


@runs
def skips_keys_and_splits_a_tie() -> dict[str, Any]:
    start(2)
    found: dict[str, Any] = {}
    for keys in (None, "cache"):
        model = Noting()
        expected = model(torch.ones(1, 4), cache=torch.ones(1))
        dispatch_model(model, {"first": 0, "second": 1}, skip_keys=keys)
        gap = (model(torch.ones(1, 4), cache=torch.ones(1)) - expected).abs().max()
        found[str(keys)] = (model.seen, float(gap.detach()))
    tied = Noting()
    tied.second.weight = tied.first.weight
    try:
        dispatch_model(tied, {"first": 0, "second": 1})
    except ConfigurationError as error:
        found["refused"] = str(error)
    dispatch_model(tied, {"first": 1, "second": "sim:1"})
    return {**found, "tied": tied.first.weight is tied.second.weight, "at": str(tied.first.weight.device)}


def test_keys_that_are_skipped_stay_where_they_are():
    (found,) = runs.of(skips_keys_and_splits_a_tie)
    assert found["None"] == (["sim:1", "sim:1"], pytest.approx(0, abs=1e-6))
    assert found["cache"] == (["sim:1", "cpu"], pytest.approx(0, abs=1e-6))


def test_a_tied_weight_that_a_map_puts_on_two_devices_is_refused_and_one_on_one_is_kept():
    (found,) = runs.of(skips_keys_and_splits_a_tie)
    assert "first.weight and second.weight are one weight, but the device map puts them on 0 and 1." in found["refused"]
    assert found["tied"]
    assert found["at"] == "sim:1"
