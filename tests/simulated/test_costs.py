"""Between two log points a step costs what it costs in a bare loop: kernels, copies, collectives, time, memory, waits.

The table of benchmarks/devices.py is made of the same counts.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from drivetrain import (
    EMAWeightAveraging,
    GradientNorm,
    LearningRateMonitor,
    MemoryMonitor,
    SpeedMonitor,
    Timer,
)
from tests.pool import device, run_in_processes
from tests.simulated.costs import COUNTED, copied_by_a_checkpoint, cost, cost_with_callbacks

pytestmark = pytest.mark.skipif(device() != "sim", reason="counts kernels of simulated devices: make test-devices")

CASES = [
    pytest.param(strategy, world, precision, accumulate, id=f"{strategy}-{precision}-{accumulate}")
    for strategy, world in (("single", 1), ("ddp", 2), ("fsdp", 2))
    for precision in ("32", "bf16-mixed")
    for accumulate in (1, 2)
]


@functools.cache
def costs(driver: str, strategy: str, world: int, precision: str, accumulate: int) -> dict[str, Any]:
    found = run_in_processes(cost, world, args=(driver, strategy, precision, accumulate, world), timeout=120)
    return found[0]


@pytest.mark.parametrize("driver", ["trainer", "accelerator"])
@pytest.mark.parametrize(("strategy", "world", "precision", "accumulate"), CASES)
def test_a_step_costs_what_it_costs_in_a_bare_loop(strategy, world, precision, accumulate, driver):
    bare = costs("bare", strategy, world, precision, accumulate)
    found = costs(driver, strategy, world, precision, accumulate)
    assert bare["kernels"] > 0
    assert found["synchronisations"] == []
    assert found["hazards"] == []
    assert found["copies"] == bare["copies"]
    assert found["collectives"] == bare["collectives"]
    # Under DDP a parameter of one number shows whether any process had a batch: at most three kernels per loss.
    shown = driver == "trainer" and strategy == "ddp"
    assert bare["kernels"] <= found["kernels"] <= bare["kernels"] + 3 * COUNTED * shown
    assert bare["bytes"] <= found["bytes"] <= bare["bytes"] + 4 * COUNTED * shown
    assert found["seconds"] <= 1.01 * bare["seconds"]
    assert found["peak"] <= 1.01 * bare["peak"]


@pytest.mark.parametrize(
    ("callback", "kernels"),
    [
        # Kernels per optimizer step. `_foreach` operations, one or two kernels on a GPU, run tensor by tensor here.
        (EMAWeightAveraging, 22),
        (GradientNorm, 0),
        (LearningRateMonitor, 0),
        (MemoryMonitor, 0),
        (SpeedMonitor, 0),
        (Timer, 0),
    ],
)
def test_callbacks_cost_no_wait_and_few_kernels(callback, kernels):
    plain = costs("trainer", "single", 1, "32", 1)
    (found,) = run_in_processes(cost_with_callbacks, 1, args=(callback,), timeout=120)
    assert found["synchronisations"] == []
    assert found["hazards"] == []
    assert found["kernels"] <= plain["kernels"] + kernels * COUNTED


def test_a_checkpoint_copies_each_byte_once():
    ((held, copied, hazards),) = run_in_processes(copied_by_a_checkpoint, 1, timeout=120)
    assert held > 0
    assert held <= copied <= 1.01 * held
    assert hazards == []
