"""FSDP gives what one plain process gives, however the model is divided, built and stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import FSDP, Task
from tests.conformance import language_model
from tests.conformance.harness import Outcome
from tests.conformance.language_model import LanguageTask, Run
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded

FP32, BF16 = 5e-6, 3e-3

STRATEGIES: dict[str, Any] = {
    "full": lambda: FSDP(),
    "whole": lambda: FSDP(wrap=None, reshard_after_forward=False),
    "offload": lambda: FSDP(cpu_offload=True),
    # Gathered in 32 bits, bf16 is cast by autocast alone, as in one process.
    "exact": lambda: FSDP(gather_dtype=torch.float32),
    "recomputed": lambda: FSDP(
        activation_checkpointing=True, activation_offload=True, forward_prefetch=2, backward_prefetch=1
    ),
    "meta": lambda: FSDP(init="meta"),
    "rank0": lambda: FSDP(init="rank0", sync_each_batch=True),
    "regrouped": lambda: FSDP(reshard_after_forward=2),
    "hybrid": lambda: FSDP(replicate_size=2),
}


WITHOUT_VALUES = ("meta", "rank0")


class BuiltLate(LanguageTask):
    """Builds its model where the Trainer lets the strategy say how."""

    def __init__(self, ragged: bool, layers: int) -> None:
        Task.__init__(self)
        self.ragged, self.layers = ragged, layers

    def configure_model(self) -> None:
        self.model = language_model.make_model(self.layers)
        assert self.trainer.strategy.options.init != "meta" or all(p.is_meta for p in self.parameters())


def train_each(cases: list[tuple[str, str, Run]]) -> list[Outcome | str]:
    """Train all cases in this process, one after another: what each left, or how it failed."""
    torch.set_num_threads(1)
    outcomes: list[Outcome | str] = []
    for strategy, driver, run in cases:
        language_model.LanguageTask = BuiltLate if strategy in WITHOUT_VALUES else LanguageTask
        outcomes.append(language_model.DRIVERS[driver](STRATEGIES[strategy](), run))
    return outcomes


def check_all(cases: list[tuple[str, str, Run]], processes: int) -> None:
    for rank, outcomes in enumerate(run_in_processes(train_each, processes, args=(cases,), timeout=240)):
        for (strategy, driver, run), outcome in zip(cases, outcomes, strict=True):
            try:
                language_model.check(outcome, expected_of(run), FP32 if run.precision == "32" else BF16, rank)
            except AssertionError as error:
                raise AssertionError(f"{strategy}, {driver}, {run}: {error}") from error


CROSSED = (("trainer", 3), ("accelerator", 1))
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
    crossed = [(name, d, Run("32", n)) for name in ("whole", "offload", "recomputed") for d, n in CROSSED]
    check_all([*cases_of("full", precision="32"), *crossed], 2)


def test_two_processes_in_bf16():
    crossed = [(name, d, Run("bf16", n)) for name in ("exact", "offload", "recomputed") for d, n in CROSSED]
    check_all([*cases_of("full", precision="bf16"), *crossed], 2)


@pytest.mark.parametrize("precision", ["64", "bf16-true", "fp16"])
def test_other_precisions(precision):
    tolerance = {"64": 1e-10, "bf16-true": 3e-2, "fp16": 3e-3}[precision]
    cases = [
        ("exact" if precision == "fp16" else "full", driver, Run(precision)) for driver in ("trainer", "accelerator")
    ]
    for rank, outcomes in enumerate(run_in_processes(train_each, 2, args=(cases,), timeout=120)):
        for outcome in outcomes:
            language_model.check(outcome, expected_of(cases[0][2]), tolerance, rank)


def test_one_process():
    check_all([("full", driver, Run("32", accumulate, 1)) for driver, accumulate in CROSSED], 1)


def test_copies_of_a_divided_model():
    check_all([("hybrid", "trainer", Run("32", 3, 4))], 4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_four_processes(precision):
    check_all(cases_of("full", "hybrid", "regrouped", "exact", "offload", precision=precision, world=4), 4)


def test_token_exact_means():
    check_all([("full", driver, Run("32", 3, 2, ragged=True)) for driver in ("trainer", "accelerator")], 2)


def test_models_built_without_values():
    runs = [Run(precision, accumulate) for precision in ("32", "bf16") for accumulate in (1, 3)]
    check_all([(strategy, "trainer", run) for strategy in WITHOUT_VALUES for run in runs], 2)
