from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, Trainer
from drivetrain.callbacks import Callback, ModelCheckpoint, Timer
from tests.callbacks.guarded import Regression, train
from tests.callbacks.tasks import Scripted, fit
from tests.pool import run_in_processes


class StepTakes(Callback):
    """Lets the clock go on with each step."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.now = seconds, time.monotonic()
        monkeypatch.setattr("drivetrain.callbacks.timer.time.monotonic", lambda: self.now)

    def on_train_batch_start(self, trainer: Trainer, task: Any, batch: Any, batch_idx: int) -> None:
        self.now += self.seconds


def test_it_stops_at_the_step_in_which_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer(timedelta(seconds=35))
    clock = StepTakes(10.0, monkeypatch)
    trainer = train(Regression({}), tmp_path, [clock, timer], enable_checkpointing=False)
    assert trainer.global_step == 4
    assert timer.time_elapsed() == pytest.approx(40)
    assert timer.time_remaining() == 0.0


def test_by_epochs_it_stops_only_at_the_end_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer("00:00:01:10", interval="epoch")
    clock = StepTakes(10.0, monkeypatch)
    trainer = train(Regression({}), tmp_path, [clock, timer], epochs=5, enable_checkpointing=False)
    assert trainer.global_step == 12
    assert trainer.current_epoch == 2


def test_the_time_before_a_resume_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def callbacks(timer: Timer) -> list[Any]:
        checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=3, save_top_k=-1)
        return [StepTakes(10.0, monkeypatch), timer, checkpoint]

    train(Regression({}), tmp_path, callbacks(Timer({"seconds": 80})), epochs=1)
    resumed = Timer({"seconds": 80})
    path = str(tmp_path / "ckpt" / "step=6.ckpt")
    trainer = train(Regression({}), tmp_path, callbacks(resumed), epochs=5, ckpt_path=path)
    assert trainer.global_step == 8
    assert resumed.time_elapsed() == pytest.approx(80)


def test_it_measures_validation_too(tmp_path: Path) -> None:
    timer = Timer()
    fit(Scripted([1, 1]), tmp_path, 2, [timer])
    assert 0 < timer.time_elapsed("validate") < timer.time_elapsed("train")
    assert timer.time_elapsed("test") == 0.0
    assert timer.time_remaining() is None
    with pytest.raises(ConfigurationError, match="Did you mean 'validate'"):
        timer.time_elapsed("validation")


def stop_on_processes(root: str) -> int:
    timer = Timer(timedelta(milliseconds=300))
    return train(Regression({}), root, [timer], epochs=100_000, enable_checkpointing=False).global_step


def test_all_processes_stop_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_in_processes(stop_on_processes, args=(str(tmp_path),))
    assert first == second > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"interval": "batch"}, "'step' or 'epoch'"), ({"duration": "soon"}, "is not a duration. Use '500 steps'")],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Timer(**options)


def test_without_time_not_one_step_is_taken(tmp_path: Path) -> None:
    timer = Timer(timedelta(0))
    assert fit(Scripted([1]), tmp_path, 3, [timer]).global_step == 0
    assert None not in (timer.start_time(), timer.end_time())
    assert timer.start_time("test") is timer.end_time("test") is None


def test_the_least_that_was_asked_for_is_trained_without_time_too(tmp_path: Path) -> None:
    assert fit(Scripted([1] * 9), tmp_path, 9, [Timer(timedelta(0))], min_epochs=2).current_epoch == 2
