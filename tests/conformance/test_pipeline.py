"""Layers spread over processes give what one plain process gives, in every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import Parallel
from tests.conformance import harness, language_model
from tests.conformance.harness import Outcome
from tests.conformance.language_model import Run
from tests.conformance.test_parallel import TOLERANCES, layers_split
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded

SCHEDULES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")

Case = tuple[dict[str, Any], Run]


def train_each(cases: list[Case]) -> list[Outcome]:
    """Train all cases in this process, one after another."""
    torch.set_num_threads(1)
    return [language_model.train_with_trainer(Parallel(**options), run) for options, run in cases]


def check_all(cases: list[Case], processes: int = 2, timeout: float = 120) -> None:
    expected = {run: language_model.train_plain(run) for _, run in cases}
    for rank, outcomes in enumerate(run_in_processes(train_each, processes, args=(cases,), timeout=timeout)):
        for (options, run), outcome in zip(cases, outcomes, strict=True):
            try:
                language_model.check(outcome, expected[run], TOLERANCES[run.precision], rank)
            except AssertionError as error:
                raise AssertionError(f"{options}, {run}: {error}") from error


def in_schedules(*runs: Run, schedules: tuple[str, ...] = SCHEDULES, **options: Any) -> list[Case]:
    return [({"pp": 2, "pp_schedule": schedule, **options}, run) for schedule in schedules for run in runs]


def test_every_schedule_with_one_and_four_micro_batches():
    check_all(in_schedules(Run("32", 1), Run("32", 4)))


def test_every_schedule_in_half_precision():
    check_all(in_schedules(Run("bf16", 4)))


@pytest.mark.parametrize("precision", ["bf16-true", "fp16"])
def test_other_precisions(precision):
    check_all(in_schedules(Run(precision, 2), schedules=("1f1b", "zbv_zero_bubble")))


def test_short_last_batches_and_windows():
    """19 rows in batches of 4 and windows of 3: the last window has two micro-batches, the last of 3 rows."""
    check_all(in_schedules(Run("32", 3, samples=19)))


def test_token_exact_means():
    check_all(in_schedules(Run("32", 4, ragged=True, samples=35), schedules=("1f1b", "interleaved_zero_bubble")))


def test_sharded_and_split_stages_on_four_processes():
    tensor = {"pp": 2, "tp": 2, "tp_plan": layers_split()}
    check_all([({"pp": 2, "dp_shard": 2}, Run("32", 2)), (tensor, Run("32", 2))], 4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sharded_and_split_stages_in_every_schedule(schedule):
    runs = [Run(precision, accumulate) for precision in ("32", "bf16") for accumulate in (1, 4)]
    kinds: list[dict[str, Any]] = [{"tp": 2, "tp_plan": layers_split()}]
    if "zero_bubble" not in schedule:  # refused there
        kinds += [{"dp_shard": 2}, {"dp_replicate": 2}]
    check_all([({"pp": 2, "pp_schedule": schedule, **kind}, run) for kind in kinds for run in runs], 4, 300)


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_sharded_stages_weigh_a_ragged_end_as_one_process_does(ragged):
    check_all([({"pp": 2, "dp_shard": 2}, Run("32", 3, ragged=ragged, samples=samples)) for samples in (19, 22)], 4)


@pytest.mark.slow
def test_four_stages_on_four_processes():
    cases = [
        ({"pp": 4, "pp_schedule": schedule}, Run("32", accumulate, layers=8))
        for schedule in SCHEDULES
        for accumulate in (1, 3, 8)
    ]
    check_all(cases, 4, 300)


def train_perceptrons(cases: list[tuple[dict[str, Any], int, int | None]]) -> list[Outcome]:
    torch.set_num_threads(1)
    return [
        harness.train_with_trainer(Parallel(pp=2, **options), "32", accumulate, 2, samples)
        for options, accumulate, samples in cases
    ]


def test_a_plain_sequence():
    cases = [
        ({"pp_split": ["2"]}, 1, None),
        ({}, 3, 29),
        ({"pp_schedule": "interleaved_1f1b"}, 4, None),
        ({"pp_schedule": "interleaved_zero_bubble"}, 2, None),
    ]
    outcomes = run_in_processes(train_perceptrons, 2, args=(cases,), timeout=120)
    for first, other, (options, accumulate, samples) in zip(*outcomes, cases, strict=True):
        expected = harness.train_plain("32", accumulate, world=2, samples=samples)
        for outcome in (first, other):
            assert outcome.losses == pytest.approx(expected.losses, abs=5e-6), options
            assert outcome.norms == pytest.approx(expected.norms, abs=5e-6), options
            assert torch.equal(outcome.predictions, expected.predictions), options
            own = {name: value for name, value in outcome.parameters.items() if not value.is_meta}
            for name, value in own.items():
                torch.testing.assert_close(value, expected.parameters[name], atol=5e-6, rtol=5e-6)
        held = [{n for n, v in each.parameters.items() if not v.is_meta} for each in (first, other)]
        assert held[0] | held[1] == set(expected.parameters), options
        assert not held[0] & held[1], options
