"""What a plan predicts is what simulated devices count: memory, collectives and time."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from drivetrain.planning import timing
from drivetrain.planning.candidates import Candidate
from drivetrain.planning.hardware import Cluster, Device
from drivetrain.planning.run import simulate
from drivetrain.planning.workload import Workload
from tests.planning.real import NETWORK, ROWS, SPEED, TOKENS, step_on_devices
from tests.pool import device, run_in_processes

pytestmark = pytest.mark.skipif(device() != "sim", reason="counts on simulated devices: make test-devices")

WAYS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single", "world_size": 1},
    "ddp": {"strategy": "ddp", "world_size": 2},
    "fsdp": {"strategy": "fsdp", "world_size": 2},
    "fsdp4": {"strategy": "fsdp", "world_size": 4},
    "fsdp+offload": {"strategy": "fsdp", "world_size": 2, "offload": True},
    "hsdp": {"strategy": "fsdp", "world_size": 4, "dp_replicate": 2},
    "tp": {"strategy": "parallel", "world_size": 2, "tp": 2},
    "fsdp+tp": {"strategy": "parallel", "world_size": 4, "tp": 2},
    "cp": {"strategy": "parallel", "world_size": 2, "cp": 2},
    "pp": {"strategy": "parallel", "world_size": 2, "pp": 2, "accumulation": 2},
}
# Each way once with each value of each option; all combinations are slow.
FEW = {("32", "adamw", False), ("bf16", "sgd", False), ("bf16", "adamw", True)}
CASES = [
    pytest.param(
        Candidate(precision=precision, batch=ROWS, checkpointing=again, **way),
        optimizer,
        id=f"{name}-{precision}-{optimizer}{'-recomputed' if again else ''}",
        marks=() if (precision, optimizer, again) in FEW else pytest.mark.slow,
    )
    for name, way in WAYS.items()
    for precision in ("32", "bf16")
    for optimizer in ("adamw", "sgd")
    for again in (False, True)
    if not again or way["strategy"] in ("fsdp", "parallel")
]


@pytest.mark.parametrize(("candidate", "optimizer"), CASES)
def test_prediction_equals_what_devices_count(candidate: Candidate, optimizer: str) -> None:
    counted = run_in_processes(step_on_devices, candidate.world_size, args=(candidate, optimizer), timeout=180)
    workload = Workload("tests.planning.models:LM", inputs=(f"{ROWS}x{TOKENS}:int64",), optimizer=optimizer)
    with sdpa_kernel(SDPBackend.MATH):  # simulated devices have no fused attention
        steps = simulate(workload, candidate)
    for step, real in zip(steps, (counted[0], counted[-1]), strict=False):
        assert step.peak == pytest.approx(real["peak"], rel=0.005)
        sent = Counter((each.operation.replace("_", ""), len(each.ranks), each.bytes) for each in step.collectives)
        assert sent == Counter((name.replace("_", ""), ranks, size) for name, ranks, size in real["calls"])
    if candidate.pp == 1 and not candidate.offload:  # what the host computes takes no simulated time
        assert _seconds(steps, candidate) == pytest.approx(counted[0]["seconds"], rel=0.1)


def _seconds(steps: Any, candidate: Candidate) -> float:
    # Simulated links take the same time for each operation on as many bytes, unlike rings.
    sim = Device("sim", 1e9, {"float32": 1e12}, SPEED, NETWORK, NETWORK)
    cluster = Cluster(sim, candidate.world_size, memory_share=1, link_share=1, launch=0, latency=1e-12)
    with mock.patch.dict(timing._SENT, dict.fromkeys(timing._SENT, lambda count: 1)):
        return timing.time_of(steps, cluster).seconds
