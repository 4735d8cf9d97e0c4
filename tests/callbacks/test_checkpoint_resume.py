"""A run that goes on from what ModelCheckpoint saved goes on with its schedules and intervals, too."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from drivetrain import Callback, ModelCheckpoint, Trainer
from tests.callbacks.guarded import Regression, rows, train
from tests.callbacks.test_checkpoint_saving import At
from tests.pool import run_in_processes


class Scheduled(Regression):
    """Notes which rate each batch was trained with, and each step of its scheduler that follows epochs."""

    def __init__(self, kind: str) -> None:
        super().__init__({})
        self.kind = kind
        self.rates: dict[tuple[int, int], float] = {}
        self.scheduled: list[tuple[int, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rates[self.current_epoch, batch_idx] = self.trainer.optimizers[0].param_groups[0]["lr"]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0 + self.current_epoch % 2)  # better in every other epoch only

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.scheduled.append((self.current_epoch, metric and float(metric)))
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if self.kind == "plateau":
            scheduler: Any = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        else:
            scheduler = ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def fit_scheduled(root: str, kind: str, interval: Any, resume: str | None = None) -> tuple[Any, ...]:
    """Train for 3 epochs of 4 batches, saving after each validation."""
    task = Scheduled(kind)
    checkpoint = ModelCheckpoint(root, "{step}", save_top_k=-1, save_on_train_epoch_end=False)
    trainer = Trainer(
        max_epochs=3,
        val_check_interval=interval,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    world = trainer.world_size
    trainer.fit(task, rows(4, world), rows(1, world), ckpt_path=resume)
    state = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return task.rates, task.scheduled, state, [parameter.tolist() for parameter in task.parameters()]


def whole_and_resumed(root: str, kind: str, interval: Any) -> list[tuple[int, Any, Any]]:
    """Resume a run from each checkpoint that it left; tells its step, the whole run and the resumed one."""
    whole = fit_scheduled(f"{root}/whole", kind, interval)
    steps = range(2 if interval else 4, 13, 2 if interval else 4)
    return [
        (step, whole, fit_scheduled(f"{root}/from{step}", kind, interval, f"{root}/whole/step={step}.ckpt"))
        for step in steps
    ]


@pytest.mark.parametrize(
    ("kind", "interval", "processes"),
    [("plateau", None, 1), ("plateau", 0.5, 1), ("exponential", None, 1), ("exponential", 0.5, 1), ("plateau", 0.5, 2)],
)
def test_schedules_step_once_an_epoch_also_where_a_run_goes_on_from_its_last_validation(
    kind: str, interval: Any, processes: int, tmp_path: Path
) -> None:
    for results in run_in_processes(whole_and_resumed, processes, args=(str(tmp_path), kind, interval)):
        assert len(results) == (6 if interval else 3)
        for step, (rates, scheduled, state, weights), resumed in results:
            assert len(set(rates.values())) > 1
            assert [epoch for epoch, _ in scheduled] == [0, 1, 2]
            # Other schedules than those that watch a value step before the epoch's last validation.
            first = step // 4 if step % 4 else step // 4 - (kind == "plateau")
            assert resumed[0] == {batch: rate for batch, rate in rates.items() if batch >= divmod(step, 4)}, step
            assert resumed[1] == scheduled[first:], step
            assert resumed[2:] == (state, weights), step


class Minutes(Callback):
    """A clock that goes on by a minute with each step, and stands for the module `time`."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return 60.0 * self.now

    def on_train_batch_start(self, trainer: Trainer, task: Any, batch: Any, batch_idx: int) -> None:
        self.now += 1


def test_an_interval_of_time_goes_on_where_it_was_and_the_pause_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: str, start: int, resume: str | None = None) -> list[str]:
        clock = Minutes(start)
        monkeypatch.setattr("drivetrain.callbacks.step_schedule.time", clock)
        by_time = ModelCheckpoint(tmp_path / folder, "{step}", train_time_interval=timedelta(minutes=10), save_top_k=-1)
        by_hand = At(7, lambda trainer: trainer.save_checkpoint(tmp_path / "by_hand"))
        path = None if resume is None else str(tmp_path / resume)
        train(Regression({}), tmp_path, [clock, by_hand, by_time], batches=16, ckpt_path=path)
        return sorted(os.listdir(tmp_path / folder))

    assert run("whole", 1000) == ["step=10.ckpt", "step=20.ckpt", "step=30.ckpt"]
    # 7 minutes of the interval were over; the machine was down for a day, or was started anew.
    assert run("later", 5000, "by_hand") == ["step=10.ckpt", "step=20.ckpt", "step=30.ckpt"]
    assert run("started_anew", 0, "by_hand") == ["step=10.ckpt", "step=20.ckpt", "step=30.ckpt"]
    assert run("from_its_own", 5000, "whole/step=10.ckpt") == ["step=20.ckpt", "step=30.ckpt"]
