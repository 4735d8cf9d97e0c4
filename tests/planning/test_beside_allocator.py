"""What a plan predicts for DeepSpeed is what torch's allocator counts when its engine trains."""

from __future__ import annotations

import pytest

from drivetrain.planning.candidates import Candidate
from drivetrain.planning.run import simulate
from drivetrain.planning.workload import Workload
from tests.planning.real import ROWS, TOKENS, peak_alone, peak_in_processes
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded

# Each stage once with each value of each option; all combinations are slow.
FEW = {(1, 2, "32", "adamw"), (2, 4, "bf16-true", "sgd"), (3, 2, "bf16", "adamw"), (3, 4, "32", "sgd")}
CASES = [
    pytest.param(
        Candidate("deepspeed", processes, precision, ROWS, stage=stage),
        optimizer,
        id=f"{stage}-{processes}-{precision}-{optimizer}",
        marks=() if (stage, processes, precision, optimizer) in FEW else pytest.mark.slow,
    )
    for stage in (1, 2, 3)
    for processes in (2, 4)
    for precision in ("32", "bf16", "bf16-true")
    for optimizer in ("adamw", "sgd")
]


def predicted(candidate: Candidate, optimizer: str) -> int:
    workload = Workload("tests.planning.models:LM", inputs=(f"{ROWS}x{TOKENS}:int64",), optimizer=optimizer)
    (step,) = simulate(workload, candidate, kernels="cpu")
    return step.peak


@pytest.mark.parametrize(("candidate", "optimizer"), CASES)
def test_prediction_equals_what_the_allocator_counts(candidate: Candidate, optimizer: str) -> None:
    (counted,) = run_in_processes(peak_alone, 1, args=(candidate, optimizer), timeout=180)
    assert predicted(candidate, optimizer) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("stage", [1, 2])
def test_prediction_is_near_what_processes_hold(stage: int) -> None:
    # At stage 3, gloo's threads hold gathered parameters for a while, which depends on their timing.
    candidate = Candidate("deepspeed", 2, "32", ROWS, stage=stage)
    counted = run_in_processes(peak_in_processes, 2, args=(candidate, "adamw"), timeout=180)
    assert predicted(candidate, "adamw") == pytest.approx(min(counted), rel=0.05)
