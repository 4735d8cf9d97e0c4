"""DeepSpeed gives what one plain process gives, at every ZeRO stage, and wherever its states are kept."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.conformance import language_model
from tests.conformance.harness import Outcome
from tests.conformance.language_model import LOCAL_ROWS, Run
from tests.pool import run_in_processes

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is missing: pip install 'drivetrain[deepspeed]'"
)

TOLERANCES = {"32": 5e-6, "bf16": 3e-3, "bf16-true": 3e-2}
Case = tuple[dict[str, Any], str, Run]


def train_each(cases: list[Case]) -> list[Outcome]:
    """Train all cases in this process, one after another: importing DeepSpeed costs more than any of them."""
    from drivetrain import DeepSpeed

    torch.set_num_threads(1)
    return [language_model.DRIVERS[driver](DeepSpeed(**options), run) for options, driver, run in cases]


def check_all(cases: list[Case], processes: int) -> None:
    for rank, outcomes in enumerate(run_in_processes(train_each, processes, args=(cases,), timeout=240)):
        for case, outcome in zip(cases, outcomes, strict=True):
            try:
                language_model.check(outcome, expected_of(case[2]), TOLERANCES[case[2].precision], rank)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


_EXPECTED: dict[Run, Outcome] = {}


def expected_of(run: Run) -> Outcome:
    if run not in _EXPECTED:
        _EXPECTED[run] = language_model.train_plain(run)
    return _EXPECTED[run]


@pytest.mark.parametrize("driver", ["trainer", "accelerator"])
def test_same_as_one_plain_process(driver):
    """ZeRO 0 to 3, in full and mixed precision, with and without accumulation."""
    runs = [Run(precision, accumulate) for precision in ("32", "bf16") for accumulate in (1, 3)]
    check_all([({"stage": stage}, driver, run) for stage in (0, 1, 2, 3) for run in runs], 2)


def test_same_where_losses_are_weighed_by_tokens():
    """Also at a ragged end, where processes hold different numbers of rows, or none."""
    ragged = [Run(ragged=True, accumulate=accumulate) for accumulate in (1, 3)]
    short = [Run(ragged=True, accumulate=3, samples=3 * 2 * LOCAL_ROWS * 3 + left) for left in (1, 3)]
    means = [Run(accumulate=3, samples=3 * 2 * LOCAL_ROWS * 3 + left) for left in (1, 3)]
    cases = [({"stage": stage}, "trainer", run) for stage in (0, 1, 2, 3) for run in [*ragged, *short, *means]]
    cases += [({"stage": stage}, "accelerator", run) for stage in (1, 3) for run in ragged]
    check_all(cases, 2)


def test_same_where_states_are_offloaded():
    cases: list[Case] = []
    for stage in (1, 2, 3):
        for accumulate in (1, 3):
            cases.append(({"stage": stage, "offload_optimizer": "cpu"}, "trainer", Run(accumulate=accumulate)))
    both = {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "stage3_param_persistence_threshold": 0}
    cases.append((both, "accelerator", Run(accumulate=3)))
    check_all(cases, 2)


def test_same_with_low_precision_weights_and_32_bit_masters():
    runs = [Run("bf16-true", accumulate) for accumulate in (1, 3)]
    check_all([({"stage": stage}, "trainer", run) for stage in (0, 1, 2, 3) for run in runs], 2)


def test_same_on_one_process():
    check_all([({"stage": stage}, "trainer", Run(world=1, accumulate=3)) for stage in (0, 1, 2, 3)], 1)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["trainer", "accelerator"])
def test_same_on_four_processes(driver):
    cases = [({"stage": stage}, driver, Run(p, 3, world=4)) for stage in (0, 1, 2, 3) for p in ("32", "bf16")]
    check_all(cases, 4)
