"""A run that was broken off and resumed is the run that was never broken off, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from drivetrain import LambdaCallback
from tests.pool import run_in_processes
from tests.trainer.resume_runs import Outcome, broken_and_resumed, run
from tests.trainer.tasks import Weight, fitted, ones, quiet

STEPS_PER_EPOCH = 12

MOMENTS = [
    *({"moment": "batch", "step": step} for step in (1, 5, 11, 12, 13, 24, 30)),
    *({"moment": "validation", "step": step} for step in (1, 13)),
    *({"moment": "epoch", "step": step} for step in (1, 13, 25)),
]

KINDS = [
    "shuffled",
    "shuffled-workers2",
    "generator",
    "permutation-workers2",
    "iterable",
    "iterable-workers1",
    "min_size",
    "max_size_cycle",
    "sequential",
    "subclass",
    "subclass-workers2",
    "around",
    "stateful",
]


def assert_same(whole: Outcome, broken: Outcome, resumed: Outcome) -> None:
    seen = len(whole.trace) - len(resumed.trace)
    assert 0 <= seen <= len(broken.trace)
    assert broken.trace[:seen] == whole.trace[:seen]
    assert resumed.trace == whole.trace[seen:]
    for kind in ("weights", "average"):
        one, other = getattr(resumed, kind), getattr(whole, kind)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert resumed.values == whole.values
    assert resumed.draws == whole.draws
    assert resumed.rows == whole.rows


@pytest.mark.parametrize("names_one", [False, True])
def test_a_variable_names_what_the_first_fit_of_a_process_resumes(
    names_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for epochs in (1, 2):
        fitted(Weight(), ones(3), max_epochs=epochs).save_checkpoint(tmp_path / str(epochs))
    monkeypatch.setenv("DRIVETRAIN_RESUME", str(tmp_path / "2"))
    steps: list[int] = []
    count = LambdaCallback(on_train_start=lambda trainer, task: steps.append(trainer.global_step))
    trainer = quiet(count, max_epochs=3)
    trainer.fit(Weight(), ones(3), resume=tmp_path / "1" if names_one else None)
    quiet(count, max_epochs=3).fit(Weight(), ones(3))
    assert steps == [3 if names_one else 6, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_resumes_any_kind_of_data_in_mid_epoch_and_at_its_end(kind, tmp_path):
    cases = [{"kind": kind, **moment} for moment in (MOMENTS[1], MOMENTS[3], MOMENTS[7], MOMENTS[9])]
    for outcomes in broken_and_resumed(str(tmp_path), cases):
        assert_same(*outcomes)


@pytest.mark.parametrize(("accumulate", "interval"), [(1, None), (1, 5), (3, 4), (5, None)])
def test_one_process_resumes_at_any_moment(accumulate, interval, tmp_path):
    steps = -(-STEPS_PER_EPOCH // accumulate)
    cases = [
        {**moment, "step": -(-moment["step"] // accumulate), "accumulate": accumulate, "interval": interval}
        for moment in MOMENTS
        if moment["step"] // accumulate <= 3 * steps
    ]
    for case, outcomes in zip(cases, broken_and_resumed(str(tmp_path), cases), strict=True):
        print(case)
        assert_same(*outcomes)


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["shuffled", "shuffled-workers2", "iterable"])
def test_two_processes_resume(kind, tmp_path):
    cases = [
        {"kind": kind, **moment, "accumulate": accumulate, "interval": interval, "epochs": 2}
        for moment, (accumulate, interval) in itertools.product(
            ({"moment": "batch", "step": 2}, {"moment": "batch", "step": 6}, {"moment": "epoch", "step": 1}),
            ((1, None), (1, 3)),
        )
    ]
    for rank in run_in_processes(broken_and_resumed, 2, args=(str(tmp_path), cases), timeout=300):
        for outcomes in rank:
            whole, broken, resumed = outcomes
            resumed.rows = resumed.rows or whole.rows  # the main process's alone
            assert_same(whole, broken, resumed)


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["generator", "permutation"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_another_number_of_processes_goes_on_with_the_same_batches(before, after, kind, tmp_path):
    """With the global batch held, the rest of the epoch and the epoch after it hold the batches of a whole run."""
    folder, batch = str(tmp_path), 8
    whole = in_processes(1, str(tmp_path / "whole"), kind=kind, rows=batch, epochs=2)[0]
    in_processes(before, folder, kind=kind, rows=batch // before, epochs=2, moment="batch", step=2)
    resumed = in_processes(after, folder, kind=kind, rows=batch // after, epochs=2, resume="yes")
    expected = {step: sorted(samples) for step, samples, _ in whole.trace[2:]}
    seen: dict[int, list[int]] = {}
    for outcome in resumed:
        for step, samples, _ in outcome.trace:
            seen.setdefault(step, []).extend(samples)
    assert {step: sorted(samples) for step, samples in seen.items()} == expected


@pytest.mark.crash
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_another_number_of_processes_sees_each_sample_once(before, after, tmp_path):
    """Also where the order of the next epoch is drawn from the global generator, which dropout draws from too."""
    folder, batch, steps = str(tmp_path), 8, 6
    broken = in_processes(before, folder, rows=batch // before, epochs=2, moment="batch", step=2)
    resumed = in_processes(after, folder, rows=batch // after, epochs=2, resume="yes")
    seen = [item for outcome in (*broken, *resumed) for item in outcome.trace]
    for epoch in (0, 1):
        samples = [s for step, batch_samples, _ in seen if step // steps == epoch for s in batch_samples]
        assert sorted(samples) == list(range(48)), epoch


def in_processes(count: int, folder: str, **case: object) -> list[Outcome]:
    return run_in_processes(run, count, args=(folder,), kwargs=case, timeout=120)
