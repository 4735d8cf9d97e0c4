"""Every strategy, precision and accumulation gives what one plain process gives on the same global batches."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.harness import LOCAL_ROWS, Outcome, train, train_plain
from tests.pool import run_in_processes

FP32, FP64, BF16, BF16_TRUE, FP16 = 5e-6, 1e-10, 3e-3, 3e-2, 3e-3
# Sending gradients in half precision costs what it costs, for each hook as measured over these steps.
HALF_SENT = 3e-3

CASES = [
    # strategy, processes, precision, tolerance
    ("single", 1, "32", FP32),
    ("single", 1, "64", FP64),
    ("single", 1, "bf16", BF16),
    ("single", 1, "bf16-true", BF16_TRUE),
    ("single", 1, "fp16", FP16),
    ("ddp", 2, "32", FP32),
    ("ddp", 2, "64", FP64),
    ("ddp", 2, "bf16", BF16),
    ("ddp", 2, "bf16-true", BF16_TRUE),
    ("ddp", 2, "fp16", FP16),
    ("ddp-static", 2, "32", FP32),
    ("ddp-unused", 2, "32", FP32),
    ("ddp-small-buckets", 2, "32", FP32),
    ("ddp-powersgd", 2, "32", FP32),
    ("ddp-batched-powersgd", 2, "32", FP32),
    ("ddp-fp16-hook", 2, "32", HALF_SENT),
    ("ddp-bf16-hook", 2, "32", 2e-2),
]


@pytest.mark.parametrize("driver", ["trainer", "accelerator"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("strategy", "processes", "precision", "tolerance"), CASES)
def test_same_as_one_plain_process(driver, strategy, processes, precision, tolerance, accumulate):
    expected = train_plain(precision, accumulate, world=2)
    for outcome in run_in_processes(train, processes, args=(driver, strategy, precision, accumulate, 2), timeout=120):
        assert_same(outcome, expected, tolerance)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("left_over", [1, 3, 6])
def test_the_trainer_weighs_a_ragged_end_as_one_process_does(left_over, accumulate):
    """The last global batch is short: processes hold different numbers of rows, or none, and the gradient is exact."""
    samples = 2 * LOCAL_ROWS * 4 + left_over
    expected = train_plain("32", accumulate, world=2, samples=samples)
    args = ("trainer", "ddp", "32", accumulate, 2, samples)
    for outcome in run_in_processes(train, 2, args=args, timeout=120):
        assert_same(outcome, expected, FP32)


def assert_same(outcome: Outcome, expected: Outcome, tolerance: float) -> None:
    assert outcome.losses == pytest.approx(expected.losses, abs=tolerance)
    assert outcome.norms == pytest.approx(expected.norms, abs=tolerance, rel=tolerance)
    assert outcome.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        torch.testing.assert_close(
            outcome.parameters[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert outcome.evaluation_loss == pytest.approx(expected.evaluation_loss, abs=tolerance)
    assert outcome.predictions.shape == expected.predictions.shape
    if tolerance <= 5e-6:
        assert torch.equal(outcome.predictions, expected.predictions)
    else:
        assert (outcome.predictions == expected.predictions).float().mean() > 0.9
