"""What counts as a step or a batch of a run, as scripts written for Lightning read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Trainer as CoreTrainer
from drivetrain.compat.lightning.pytorch import Trainer
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from drivetrain.compat.lightning.pytorch.strategies import DDPStrategy
from tests.pool import run_in_processes

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "limit_val_batches": 0,
}


class LeavesOut(BoringModel):
    """Returns no loss for some batches."""

    def __init__(self, *left_out: int) -> None:
        super().__init__()
        self.left_out, self.scheduled = left_out, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.left_out else super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.scheduled += 1
        super().lr_scheduler_step(scheduler, metric)


def test_a_step_without_a_loss_counts(tmp_path: Path) -> None:
    task = LeavesOut(0, 2)
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=4, **QUIET)
    trainer.fit(task)
    assert (trainer.global_step, task.scheduled) == (4, 4)


def test_a_run_of_so_many_steps_ends_where_none_has_a_loss(tmp_path: Path) -> None:
    task = LeavesOut(*range(64))
    before = task.layer.weight.detach().clone()
    trainer = Trainer(default_root_dir=tmp_path, max_steps=3, **QUIET)
    trainer.fit(task)
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)
    assert torch.equal(task.layer.weight, before)


def test_a_step_without_a_batch_does_not_count(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, **QUIET)
    data = torch.utils.data.DataLoader(range(3), collate_fn=lambda one: torch.ones(1, 32) if one != [1] else None)
    trainer.fit(BoringModel(), data)
    assert trainer.global_step == 2


def test_the_core_counts_steps_of_optimizers_alone(tmp_path: Path) -> None:
    task = LeavesOut(0, 2)
    trainer = CoreTrainer(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=4, **QUIET)
    trainer.fit(task)
    assert (trainer.global_step, task.scheduled) == (2, 2)


def steps_of_a_process(root: str) -> tuple[int, int]:
    class LeavesOutHere(LeavesOut):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            is_left_out = batch_idx == 1 or (batch_idx == 0 and self.global_rank == 1)
            return None if is_left_out else super().training_step(batch, batch_idx)

    trainer = Trainer(default_root_dir=root, max_epochs=1, limit_train_batches=3, strategy="ddp", devices=2, **QUIET)
    task = LeavesOutHere()
    trainer.fit(task)
    return trainer.global_step, task.scheduled


def test_all_processes_count_alike(tmp_path: Path) -> None:
    assert run_in_processes(steps_of_a_process, 2, args=[str(tmp_path)], timeout=60) == [(3, 3)] * 2


@pytest.mark.parametrize("keeps", [True, False])
def test_predicted_batches_are_counted(keeps: bool, tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    data = torch.utils.data.DataLoader(torch.ones(6, 32), batch_size=2)
    trainer.predict(BoringModel(), data, return_predictions=keeps)
    assert trainer.predict_loop.return_predictions is keeps
    progress = trainer.predict_loop.batch_progress
    assert (progress.current.completed, progress.total.completed) == (3, 3)
    trainer.predict(BoringModel(), data, return_predictions=keeps)
    assert (progress.current.completed, progress.total.completed) == (3, 6)


class Reads(BoringModel):
    """Notes the step of the loggers, whether they are due and whether the window goes on, around each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool, bool]] = []

    def note(self) -> None:
        loop = self.trainer.fit_loop
        due = self.trainer._logger_connector.should_update_logs
        self.seen.append((loop.epoch_loop._batches_that_stepped, due, loop._should_accumulate()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note()


def test_the_step_of_the_loggers_is_that_before_the_batchs_own(tmp_path: Path) -> None:
    task, options = Reads(), {"accumulate_grad_batches": 2, "log_every_n_steps": 2, "limit_train_batches": 5}
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, **options, **QUIET)
    trainer.fit(task)
    batches = [(0, False, True), (0, False, False), (1, True, True), (1, True, False), (2, False, False)]
    assert task.seen == [each for batch in batches for each in (batch, batch)]
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 3
    assert (trainer._accelerator_connector.is_distributed, trainer._logger_connector.should_update_logs) == (
        False,
        True,
    )
    assert trainer._accelerator_connector._parallel_devices == [torch.device("cpu")] * trainer.num_devices
    with pytest.raises(AttributeError, match=r"_accelerator_connector\.parallel_devices is not here"):
        trainer._accelerator_connector.parallel_devices  # noqa: B018


@pytest.mark.parametrize("names", [("completed",), ("processed",), ("ready", "started", "processed", "completed")])
def test_the_epoch_can_be_set_by_its_counters(names: tuple[str, ...], tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=5, limit_train_batches=1, **QUIET)
    for name in names:
        setattr(trainer.fit_loop.epoch_progress.current, name, 3)
    assert trainer.current_epoch == 3
    trainer.fit(BoringModel())
    assert (trainer.current_epoch, trainer.global_step) == (5, 2)


@pytest.mark.parametrize("strategy", ["auto", DDPStrategy()], ids=["auto", "DDPStrategy"])
def test_a_strategy_shows_what_it_drives(strategy: Any, tmp_path: Path) -> None:
    task, options = BoringModel(), {"strategy": strategy, "devices": 1, "limit_train_batches": 1}
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, **options, **QUIET)
    assert (trainer.strategy.lightning_module, trainer.strategy.optimizers) == (None, [])
    trainer.fit(task)
    shown = trainer.strategy
    assert (shown.lightning_module, shown.model) == (task, trainer.model)
    assert shown.optimizers == trainer.optimizers
    assert len(shown.lr_scheduler_configs) == 1
    assert shown.parallel_devices == [shown.root_device]
