"""FSDP gives what one plain process gives, however the model is divided, built and stored."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain import FSDP
from tests.conformance import language_model
from tests.conformance.harness import Outcome
from tests.conformance.language_model import Run
from tests.pool import run_in_processes

FP32, BF16 = 5e-6, 3e-3

STRATEGIES: dict[str, Any] = {
    "full": lambda: FSDP(),
    "whole": lambda: FSDP(wrap=None, reshard_after_forward=False),
    "offload": lambda: FSDP(cpu_offload=True),
    # Gathered in 32 bits, bf16 is cast by autocast alone, as in one process.
    "exact": lambda: FSDP(gather_dtype=torch.float32),
    "offload-exact": lambda: FSDP(cpu_offload=True, gather_dtype=torch.float32),
    "hybrid": lambda: FSDP(replicate_size=2),
}


def train_each(cases: list[tuple[str, str, Run]]) -> list[Outcome | str]:
    """Train all cases in this process, one after another: what each left, or how it failed."""
    torch.set_num_threads(1)
    outcomes: list[Outcome | str] = []
    for strategy, driver, run in cases:
        outcomes.append(language_model.DRIVERS[driver](STRATEGIES[strategy](), run))
    return outcomes


def check_all(cases: list[tuple[str, str, Run]], processes: int) -> None:
    for rank, outcomes in enumerate(run_in_processes(train_each, processes, args=(cases,), timeout=240)):
        for (strategy, driver, run), outcome in zip(cases, outcomes, strict=True):
            tolerance = FP32 if run.precision == "32" else BF16
            try:
                language_model.check(outcome, expected_of(run), tolerance, rank)
            except AssertionError as error:
                raise AssertionError(f"{strategy}, {driver}, {run}: {error}") from error


_EXPECTED: dict[Run, Outcome] = {}


def expected_of(run: Run) -> Outcome:
    if run not in _EXPECTED:
        _EXPECTED[run] = language_model.train_plain(run)
    return _EXPECTED[run]


def cases_of(*strategies: str, precision: str, world: int = 2) -> list[tuple[str, str, Run]]:
    return [
        (strategy, driver, Run(precision, accumulate, world))
        for strategy in strategies
        for driver in ("trainer", "accelerator")
        for accumulate in (1, 3)
    ]


def test_two_processes_in_full_precision():
    check_all(cases_of("full", "whole", "offload", precision="32"), 2)


def test_two_processes_in_bf16():
    check_all(cases_of("exact", "offload-exact", precision="bf16"), 2)


def test_one_process():
    check_all(cases_of("full", precision="32"), 1)
