"""Small tasks for the tests of callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer
from drivetrain.callbacks import ModelCheckpoint


def numbers(count: int, batch_size: int) -> DataLoader[Any]:
    """The numbers 0, 1, ..., one a row."""
    return DataLoader(TensorDataset(torch.arange(count, dtype=torch.float32)[:, None]), batch_size=batch_size)


class Scripted(Task):
    """Trains next to nothing and logs as ``val_loss`` the next of the values given, once each validation.

    Args:
        values: One value for each validation.
        in_training: Log them as ``epoch_loss`` at the end of each training epoch instead.
    """

    def __init__(self, values: Sequence[float] = (), in_training: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.values = list(values)
        self.in_training = in_training
        self.seen: list[int] = []  # epochs that were validated

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if not self.in_training and not self.trainer.sanity_checking:
            self.log("val_loss", self.values[len(self.seen)])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append(self.current_epoch)

    def on_train_epoch_end(self) -> None:
        if self.in_training:
            self.log("epoch_loss", self.values[self.current_epoch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(
    task: Task,
    root: Any,
    epochs: int,
    callbacks: list[Any],
    validate: bool = True,
    resume: str | None = None,
    **options: Any,
) -> Trainer:
    """Fit a task quietly: two batches a step of training and one of validation for each process."""
    settings: dict[str, Any] = {
        "max_epochs": epochs,
        "default_root_dir": str(root),
        "callbacks": callbacks,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "num_sanity_val_steps": 0,
    }
    trainer = Trainer(**{**settings, **options})
    world = trainer.world_size
    trainer.fit(task, numbers(8 * world, 4), numbers(4 * world, 4) if validate else None, resume=resume)
    return trainer
