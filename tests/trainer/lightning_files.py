"""Plain torch loops that leave what Lightning's Trainer would, in its schema, for tests that need no Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer

BATCHES = 6


def data(batch_size: int = 4) -> DataLoader[Any]:
    fixed = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * 4, 2, generator=fixed)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


class Line(Task):
    """A linear layer with Adam and a rate that falls by half each epoch; it remembers its losses."""

    def __init__(self, lr: float = 0.1, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.layer = nn.Linear(width, 1)
        self.losses: list[tuple[int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append((batch_idx, float(loss.detach())))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self(batch[0]) - batch[1]).square().mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("tested", self.layer.weight.sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def quiet(root: Path, **options: Any) -> Trainer:
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", default_root_dir=root, **{"enable_model_summary": False, **settings, **options})


def counts(ready: int, processed: int | None = None, completed: int | None = None) -> dict[str, int]:
    processed = ready if processed is None else processed
    return {
        "ready": ready,
        "started": ready,
        "processed": processed,
        "completed": processed if completed is None else completed,
    }


def train(steps: int) -> tuple[Line, torch.optim.Optimizer, Any, list[tuple[int, float]]]:
    """Train `Line` by a plain loop; the rate falls once an epoch's last batch is done."""
    task = Line()
    [optimizer], [schedule] = task.configure_optimizers()
    while len(task.losses) < steps:
        for number, batch in enumerate(data()):
            optimizer.zero_grad()
            task.training_step(batch, number).backward()
            optimizer.step()
            if number == BATCHES - 1:
                schedule.step()
            if len(task.losses) == steps:
                break
    return task, optimizer, schedule, task.losses


def content(steps: int, at_epoch_end: bool = False, **more: Any) -> dict[str, Any]:
    """What Lightning would have saved after so many batches: in the hook of the batch's end, or of the epoch's end."""
    task, optimizer, schedule, _ = train(steps)
    epoch, done = divmod(steps, BATCHES)
    if done == 0:
        epoch, done = epoch - 1, BATCHES
    batches = {
        "total": counts(steps, completed=steps - (not at_epoch_end)),
        "current": counts(done, completed=done - (not at_epoch_end)),
        "is_last_batch": done == BATCHES,
    }
    epochs = counts(epoch + 1, epoch + at_epoch_end, epoch)
    return {
        "epoch": epoch,
        "global_step": steps,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": task.state_dict(),
        "loops": {"fit_loop": {"epoch_loop.batch_progress": batches, "epoch_progress": {"current": epochs}}},
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "width": 2},
        **more,
    }


def write(path: Path, steps: int, at_epoch_end: bool = False, **more: Any) -> str:
    torch.save(content(steps, at_epoch_end, **more), path)
    return str(path)
