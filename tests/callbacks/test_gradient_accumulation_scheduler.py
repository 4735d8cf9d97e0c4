from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError, Trainer
from drivetrain.callbacks import GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from tests.callbacks.guarded import Regression, rows

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def test_steps_hold_as_many_micro_batches_as_the_epoch_says() -> None:
    steps: list[int] = []
    counter = LambdaCallback(on_train_epoch_end=lambda trainer, task: steps.append(trainer.global_step))
    scheduler = GradientAccumulationScheduler({1: 2, 3: 4})
    trainer = Trainer(max_epochs=4, callbacks=[scheduler, counter], **QUIET)
    planned: list[float] = []
    counter.on_train_start = lambda *_: planned.append(trainer.estimated_stepping_batches)  # type: ignore[method-assign]
    trainer.fit(Regression({}), rows(6))
    assert steps == [6, 9, 12, 14]
    assert planned == [14]
    assert trainer.accumulate_grad_batches == 1


def test_an_epoch_trains_as_with_the_trainers_own_argument() -> None:
    def trained(**options: Any) -> torch.Tensor:
        task = Regression({})
        Trainer(max_epochs=2, **QUIET, **options).fit(task, rows(4))
        return task.layer.weight.detach()

    scheduled = trained(callbacks=[GradientAccumulationScheduler({0: 2})])
    assert torch.equal(scheduled, trained(accumulate_grad_batches=2))
    assert not torch.equal(scheduled, trained())


def test_a_resumed_run_continues_within_its_epoch(tmp_path: Path) -> None:
    def trained(**options: Any) -> torch.Tensor:
        task = Regression({})
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
        settings = {**QUIET, "enable_checkpointing": True}
        trainer = Trainer(max_epochs=2, callbacks=[GradientAccumulationScheduler({1: 2}), saving], **settings)
        trainer.fit(task, rows(4), **options)
        return task.layer.weight.detach()

    assert torch.equal(trained(), trained(resume=tmp_path / "step=5.ckpt"))


@pytest.mark.parametrize(
    ("scheduling", "message"),
    [
        ({}, "must be a dict"),
        ({-1: 2}, "Epoch should be an int from 0"),
        ({0: 0}, "factor should be an int of at least 1"),
        ({0: 1.5}, "factor should be an int of at least 1"),
    ],
)
def test_what_is_no_schedule_is_refused(scheduling: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GradientAccumulationScheduler(scheduling)


def test_two_ways_of_saying_it_are_refused() -> None:
    trainer = Trainer(
        max_epochs=1, callbacks=[GradientAccumulationScheduler({0: 2})], accumulate_grad_batches=2, **QUIET
    )
    with pytest.raises(ConfigurationError, match="You have set `accumulate_grad_batches`"):
        trainer.fit(Regression({}), rows(2))


def test_a_task_that_optimizes_by_hand_is_refused() -> None:
    class ByHand(Regression):
        automatic_optimization = False

    trainer = Trainer(max_epochs=1, callbacks=[GradientAccumulationScheduler({0: 2})], **QUIET)
    with pytest.raises(ConfigurationError, match="no effect on ByHand, which optimizes by hand"):
        trainer.fit(ByHand({}), rows(2))
