"""Random models and budgets: each map covers the model, keeps ties together, fits, and is found where there is one."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain import ConfigurationError, DeviceMap, check_device_map, infer_auto_device_map
from tests.inference.random_models import Case, Counted, random_case, units_of
from tests.pool import run_in_processes
from tests.simulated.devices import Simulated, start
from tests.simulated.devices import simulated as simulated

MOST_GROUPS = 8
"""Up to so many parts all maps are tried where none is found."""

SEEDS = st.integers(0, 10**9)


def found_for(case: Case) -> DeviceMap | None:
    """The map of each unit; None where it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of buffers that are offloaded too
        try:
            return infer_auto_device_map(case.model, **case.arguments, clean_result=False)
        except ConfigurationError:
            return None


def holds(case: Case) -> None:
    """Assert that a map is right, and that there is none where it is refused."""
    found = found_for(case)
    units = units_of(case)
    counts = [Counted(case, units, offloaded) for offloaded in {case.offload_buffers, True}]
    if found is None:
        assert len(counts[0].tied_units()) > MOST_GROUPS or not any(each.any_map_fits() for each in counts)
        return
    check_device_map(case.model, found)
    assert set(found) == set(units)
    assert any(each.fits(found, found.main_device) for each in counts)
    assert all(share.free >= 0 for share in found.shares.values())


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(SEEDS)
def test_maps_of_random_models_hold(seed: int):
    holds(random_case(random.Random(seed)))


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS)
def test_maps_of_2000_random_models_hold(seed: int):
    holds(random_case(random.Random(seed)))


def test_the_count_apart_from_the_solver_finds_maps_that_do_not_hold():
    """What the property rests on: maps that break each rule are seen to."""
    case = Case(torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(4, 1, bias=False)), {0: 16})
    counted = Counted(case, ["0", "1"], False)
    assert not counted.fits({"0": 0, "1": 0}, None)
    assert not counted.fits({"0": 0, "1": "disk"}, 0)
    assert not counted.fits({"0": "disk", "1": "disk"}, None)
    assert counted.fits({"0": "disk", "1": "disk"}, 0)
    assert counted.any_map_fits()
    case.model[1].weight = case.model[0].weight
    assert counted.tied_units() == [["0"], ["1"]]  # names of before
    assert Counted(case, ["0", "1"], False).tied_units() == [["0", "1"]]
    assert Counted(case, ["0", "1"], False).fits({"0": 0, "1": 0}, None)


# On simulated devices


def run_on(sim: Simulated, case: Case, found: DeviceMap) -> bool:
    """Put weights where a map has them, and bring what is kept elsewhere to the main device; whether any was.

    Raises:
        OutOfMemoryError: A device has less memory than the map takes.
    """
    offloaded = next(
        each
        for each in (Counted(case, found, offloaded) for offloaded in (case.offload_buffers, True))
        if each.fits(found, found.main_device)
    )
    caps = [case.max_memory.get(device, 0) for device in range(sim.count)]
    with sim.capped(*(cap or 1 for cap in caps)):
        held, kept = [], []
        for device in set(found.values()):
            units = [unit for unit in found if found[unit] == device]
            names = [name for unit in units for name in offloaded.inside[unit]]
            if isinstance(device, int):
                held.append(placed(offloaded, names, device))
            elif device == "disk" or found.main_device != "cpu":
                kept += units
        main = found.main_device
        if not isinstance(main, int):
            return False
        if not offloaded.offload_buffers:
            buffers = [n for unit in kept for n in offloaded.inside[unit] if n not in offloaded.parameters]
            held.append(placed(offloaded, buffers, main))
        for unit in kept:
            moved = [n for n in offloaded.inside[unit] if offloaded.offload_buffers or n in offloaded.parameters]
            brought = placed(offloaded, moved, main)
            del brought
        return bool(kept)


def placed(counted: Counted, names: list[str], device: int) -> torch.Tensor:
    return torch.empty(counted.bytes_of(names), dtype=torch.uint8, device=f"sim:{device}")


def run_all_on_capped_devices(models: int) -> tuple[int, int]:
    """Run the maps of so many models, in a process of its own: how many there are, and how many stream."""
    sim = start(3)
    streams = []
    for seed in range(models):
        case = random_case(random.Random(seed))
        found = found_for(case)
        if found is not None:
            streams.append(run_on(sim, case, found))
    return len(streams), sum(streams)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("models", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_maps_of_random_models_run_on_devices_with_so_much_memory_and_no_more(models: int):
    ((ran, streamed),) = run_in_processes(run_all_on_capped_devices, 1, args=(models,), timeout=200)
    assert ran > models // 2
    assert streamed > models // 10
