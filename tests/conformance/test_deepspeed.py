"""DeepSpeed gives what one plain process gives, at every ZeRO stage, and wherever its states are kept."""

from __future__ import annotations

import gc
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.conformance import harness, language_model
from tests.conformance.harness import LOCAL_ROWS, MAX_NORM, STEPS, Outcome
from tests.conformance.test_conformance import BF16, BF16_TRUE, FP32, assert_same
from tests.pool import run_in_processes

pytestmark = [
    pytest.mark.sharded,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="deepspeed is missing: pip install 'drivetrain[deepspeed]'"
    ),
]

TOLERANCES = {"32": FP32, "bf16": BF16, "bf16-true": BF16_TRUE}
STAGES = (0, 1, 2, 3)


class Case(NamedTuple):
    options: dict[str, Any]
    driver: str
    precision: str = "32"
    accumulate: int = 1
    samples: int | None = None


PLAIN = [
    Case({"stage": stage}, driver, precision, accumulate)
    for driver in ("trainer", "accelerator")
    for stage in STAGES
    for precision in ("32", "bf16")
    for accumulate in (1, 3)
]
# The last batches are short: processes hold different numbers of rows, or none.
RAGGED = [
    Case({"stage": stage}, "trainer", accumulate=3, samples=2 * LOCAL_ROWS * 4 + left_over)
    for stage in STAGES
    for left_over in (1, 6)
]
EVERYTHING = {"offload_optimizer": "cpu", "offload_param": "cpu", "stage3_param_persistence_threshold": 0}
OFFLOADED = [
    Case({"stage": stage, "offload_optimizer": "cpu"}, "trainer", accumulate=accumulate)
    for stage in (1, 2, 3)
    for accumulate in (1, 3)
] + [Case({"stage": 3, **EVERYTHING}, "trainer", accumulate=3)]
LOW = [Case({"stage": stage}, "trainer", "bf16-true", accumulate) for stage in STAGES for accumulate in (1, 3)]
# Two global batches and a bit, of a language model whose rows have different numbers of tokens.
TOKENS = language_model.Run(ragged=True, accumulate=3, samples=2 * 2 * language_model.LOCAL_ROWS * 3 + 1, layers=1)
LANGUAGE = [Case({"stage": stage}, "language") for stage in STAGES]


def train_each(cases: list[Case], world: int) -> list[Outcome]:
    """Train all cases in this process, one after another: importing DeepSpeed costs more than any of them."""
    from drivetrain import DeepSpeed

    torch.set_num_threads(1)
    outcomes = []
    for options, driver, precision, accumulate, samples in cases:
        gc.freeze()  # DeepSpeed collects garbage where it makes an engine, which takes a second with all it imports
        if driver == "language":
            outcomes.append(language_model.train_with_trainer(DeepSpeed(**options), TOKENS))
        else:
            outcomes.append(harness.DRIVERS[driver](DeepSpeed(**options), precision, accumulate, world, samples))
    return outcomes


@pytest.fixture(scope="module")
def trained():
    """What all processes have trained, by the case's text."""
    cases = [*PLAIN, *RAGGED, *OFFLOADED, *LOW, *LANGUAGE]
    everyone = run_in_processes(train_each, 2, args=(cases, 2), timeout=280)
    return {str(case): outcomes for case, *outcomes in zip(cases, *everyone, strict=True)}


def check(case: Case, outcomes: list[Outcome]) -> None:
    expected, whole = expected_of(case, len(outcomes)), together(outcomes)
    for outcome in outcomes:
        try:
            assert_same(replace(outcome, parameters=whole), expected, TOLERANCES[case.precision])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def together(outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    """The parameters, of which each process may keep another part."""
    names = outcomes[0].parameters
    return {name: next(one.parameters[name] for one in outcomes if not one.parameters[name].is_meta) for name in names}


_EXPECTED: dict[Any, Outcome] = {}


def expected_of(case: Case, world: int) -> Outcome:
    key = (case.precision, case.accumulate, world, case.samples)
    if key not in _EXPECTED:
        train = train_with_masters if case.precision == "bf16-true" else harness.train_plain
        _EXPECTED[key] = train(*key)
    return _EXPECTED[key]


def train_with_masters(precision: str, accumulate: int, world: int, samples: int | None = None) -> Outcome:
    """One plain process whose weights are bfloat16 and stepped in 32 bits: what DeepSpeed's bf16 is."""
    model = harness.make_model().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = harness.make_optimizer(masters)
    rows = LOCAL_ROWS * world
    micro_batches = list(DataLoader(harness.training_set(rows * accumulate * STEPS), batch_size=rows))
    outcome = Outcome()
    for start in range(0, len(micro_batches), accumulate):
        model.zero_grad()
        for x, y in micro_batches[start : start + accumulate]:
            loss = F.cross_entropy(model(x.bfloat16()).float(), y)
            outcome.losses.append(loss.item())
            (loss / accumulate).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        outcome.norms.append(nn.utils.clip_grad_norm_(masters, MAX_NORM).item())
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)
    outcome.parameters = {
        name: master.detach() for (name, _), master in zip(model.named_parameters(), masters, strict=True)
    }
    x, y = harness.evaluation_set().tensors
    with torch.no_grad():
        logits = model(x.bfloat16()).float()
    outcome.predictions, outcome.evaluation_loss = logits.argmax(-1), F.cross_entropy(logits, y).item()
    return outcome


@pytest.mark.parametrize("driver", ["trainer", "accelerator"])
@pytest.mark.parametrize("stage", STAGES)
def test_same_as_one_plain_process(trained, stage, driver):
    for case in PLAIN:
        if case.options["stage"] == stage and case.driver == driver:
            check(case, trained[str(case)])


def test_same_at_a_ragged_end(trained):
    for case in RAGGED:
        check(case, trained[str(case)])


def test_same_where_states_are_offloaded(trained):
    for case in OFFLOADED:
        check(case, trained[str(case)])


def test_same_with_low_precision_weights_and_32_bit_masters(trained):
    for case in LOW:
        check(case, trained[str(case)])


def test_the_gradient_is_that_of_the_mean_over_all_tokens(trained):
    expected = language_model.train_plain(TOKENS)
    for case in LANGUAGE:
        for rank, outcome in enumerate(trained[str(case)]):
            language_model.check(outcome, expected, TOLERANCES["32"], rank)


@pytest.mark.parametrize("processes", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_same_on_other_numbers_of_processes(processes):
    cases = [Case({"stage": stage}, "trainer", accumulate=3) for stage in (2, 3)]
    everyone = run_in_processes(train_each, processes, args=(cases, processes), timeout=240)
    for case, *outcomes in zip(cases, *everyone, strict=True):
        check(case, outcomes)
