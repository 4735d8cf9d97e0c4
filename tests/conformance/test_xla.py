"""XLA devices, one and four as one, give what one plain process gives."""

from __future__ import annotations

import pytest

from tests.conformance import language_model
from tests.conformance.harness import Outcome
from tests.conformance.language_model import Run
from tests.conformance.strategies import ROWS
from tests.pool import run_in_processes
from tests.strategies.xla.running import environment

pytestmark = [pytest.mark.xla, pytest.mark.timeout(1800)]

FP32, BF16, BF16_TRUE = 5e-6, 3e-3, 3e-2
# XLA computes erf and exp by approximations of its own, which differ from torch's beyond the tenth digit.
FP64 = 1e-9

CASES = [
    # strategy, driver, what is trained, tolerance
    ("xla", "trainer", Run(accumulate=3, layers=2, device="xla"), FP32),
    ("xla", "accelerator", Run(layers=2, device="xla"), FP32),
    ("xla", "trainer", Run(accumulate=2, layers=2, ragged=True, device="xla"), FP32),
    ("xla", "trainer", Run("bf16", layers=2, device="xla"), BF16),
    ("xla", "trainer", Run("64", layers=2, device="xla"), FP64),
    ("xla", "trainer", Run("bf16-true", layers=2, device="xla"), BF16_TRUE),
    ("xla-data", "trainer", Run(layers=2, device="xla"), FP32),
    ("xla-fsdp", "trainer", Run(accumulate=3, layers=2, device="xla"), FP32),
    ("xla-fsdp", "accelerator", Run(layers=2, device="xla"), FP32),
    ("xla-fsdp", "accelerator", Run("bf16", layers=2, device="xla"), BF16),
    ("xla-tp", "trainer", Run(layers=2, device="xla"), FP32),
    ("xla-tp-fsdp", "trainer", Run(layers=2, device="xla"), FP32),
]
NAMES = [
    f"{name}, {driver}, {run.precision}, {run.accumulate}{', ragged' * run.ragged}" for name, driver, run, _ in CASES
]


def run_all(devices: int) -> dict[str, Outcome]:
    """Every case for so many devices, in one process: a runtime starts once."""
    outcomes = {}
    for name, (strategy, driver, run, _) in zip(NAMES, CASES, strict=True):
        if ROWS[strategy].devices == devices:
            outcomes[name] = language_model.DRIVERS[driver](ROWS[strategy].make(), run)
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for devices in (1, 4):
        found |= run_in_processes(run_all, 1, args=(devices,), env=environment(devices), timeout=900)[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_same_as_one_plain_process(name: str, outcomes: dict[str, Outcome]) -> None:
    _, _, run, tolerance = CASES[NAMES.index(name)]
    language_model.check(outcomes[name], language_model.train_plain(run), tolerance)
