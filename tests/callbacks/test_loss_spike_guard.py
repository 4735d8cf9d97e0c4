from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError, DrivetrainError
from drivetrain.callbacks import LossSpikeGuard, ModelCheckpoint, NaNGuard
from drivetrain.callbacks.guards import modified_z_score
from tests.callbacks.guarded import Regression, state_of, train
from tests.pool import run_in_processes


def judged(values: list[float], **options: Any) -> list[int]:
    """Where a guard that sees these values one after another calls them spikes."""
    guard = LossSpikeGuard(**options)
    return [index for index, value in enumerate(values) if guard.judge(value) is not None]


def test_the_score_is_that_of_the_book() -> None:
    # Median 3, absolute deviations 2 1 0 1 7, so MAD 1.
    score, median = modified_z_score(10.0, [1.0, 2.0, 3.0, 4.0, 10.0])
    assert median == 3.0
    assert score == pytest.approx(0.6745 * 7.0)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike_and_a_spike_is_one(seed: int) -> None:
    rng = random.Random(seed)
    losses = [2.0 * math.exp(-step / 300) + rng.gauss(0, 0.05) for step in range(400)]
    assert judged(losses, window=50) == []
    losses[200], losses[201], losses[330] = 9.0, 20.0, 5.0
    assert judged(losses, window=50) == [200, 201, 330]


def test_a_loss_that_falls_fast_is_no_spike() -> None:
    assert judged([1.0] * 50 + [0.1], window=20) == []


def test_a_loss_that_stands_still_may_move_a_little() -> None:
    assert judged([1.0] * 50 + [1.0001] + [1.0] * 10, window=20) == []
    assert judged([1.0] * 50 + [1.5], window=20) == [50]


def test_nothing_is_judged_before_half_the_window_is_there() -> None:
    assert judged([1.0, 1.1, 0.9, 100.0, 1.0, 1.1], window=8) == []
    assert judged([1.0, 1.1, 0.9, 1.0, 1.1, 100.0], window=8) == [5]


def test_values_that_are_not_finite_are_left_to_the_other_guard() -> None:
    assert judged([1.0] * 20 + [math.nan, math.inf, 1.0], window=8) == []


def test_stop_names_the_step_and_how_far_it_is_off(tmp_path: Path) -> None:
    guard = LossSpikeGuard(window=10, threshold=1000)
    with pytest.raises(DrivetrainError, match=r"LossSpikeGuard: the loss is .* above the median .*step 15.*batch 15"):
        train(Regression({(0, 15): 1e6}), tmp_path, [guard], batches=20, epochs=1, enable_checkpointing=False)


def test_the_loss_of_an_accumulated_step_is_its_mean(tmp_path: Path) -> None:
    seen: list[float] = []

    class Seen(LossSpikeGuard):
        def judge(self, value: float) -> str | None:
            seen.append(value)
            return None

    task = Regression({})
    losses: list[float] = []
    step = task.training_step
    task.training_step = lambda batch, index: (loss := step(batch, index), losses.append(loss.item()))[0]  # type: ignore
    train(task, tmp_path, [Seen()], batches=6, epochs=1, accumulate_grad_batches=3, enable_checkpointing=False)
    assert seen == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3])


def test_the_loss_under_fp16_is_that_without_the_scale(tmp_path: Path) -> None:
    guard = LossSpikeGuard(window=10)
    task = Regression({})
    train(task, tmp_path, [guard], batches=6, epochs=1, precision="fp16", enable_checkpointing=False)
    assert max(guard._values) < 10


def test_rollback_goes_back_and_remembers_the_window(tmp_path: Path) -> None:
    guard = LossSpikeGuard(window=10, threshold=1000, action="rollback")
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=5)
    task = Regression({(0, 17): 1e6})
    train(task, tmp_path, [NaNGuard(action="rollback"), guard, checkpoint], batches=20, epochs=1)
    assert guard.rollbacks == 1
    assert task.trained[18:] == [(0, 15), (0, 16), (0, 18), (0, 19)]
    assert len(guard._values) == 10


def skip_on_processes(root: str) -> dict[str, Any]:
    guard = LossSpikeGuard(window=10, threshold=1000, action="skip")
    task = Regression({(0, 15): 1e6}, rank=1)
    trainer = train(task, root, [guard], batches=20, epochs=1, enable_checkpointing=False)
    return {**state_of(trainer), "skipped": guard.skipped, "values": list(guard._values)}


def test_all_processes_judge_the_mean_of_all(tmp_path: Path) -> None:
    first, second = run_in_processes(skip_on_processes, args=(str(tmp_path),))
    assert first["skipped"] == second["skipped"] == [(0, 15)]
    assert first["values"] == second["values"]
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0, check_device=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 2}, "at least 4"),
        ({"threshold": 0.0}, "a positive score"),
        ({"action": "stopp"}, "Did you mean 'stop'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LossSpikeGuard(**options)
