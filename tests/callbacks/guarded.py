"""A task whose loss goes wrong where it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer


def rows(batches: int, world: int = 1, size: int = 4) -> DataLoader[Any]:
    """Batches of random rows, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batches * size * world, 3, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=size)


class Regression(Task):
    """A small regression with momentum and a schedule, whose loss is multiplied where it is told to.

    Args:
        wrong: (epoch, batch index) -> what the loss is multiplied with.
        rank: on which process; on all if None.
        times: how often altogether; always if None.
    """

    def __init__(
        self, wrong: Mapping[tuple[int, int], float], rank: int | None = None, times: int | None = None
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)
        self.wrong, self.rank, self.times = dict(wrong), rank, times
        self.trained: list[tuple[int, int]] = []  # (epoch, batch index) of each training step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        place = (self.current_epoch, batch_idx)
        self.trained.append(place)
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        here = self.rank is None or self.rank == self.trainer.global_rank
        if here and place in self.wrong and self.times != 0:
            if self.times is not None:
                self.times -= 1
            loss = loss * self.wrong[place]
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(
    task: Task,
    root: Any,
    callbacks: list[Any],
    batches: int = 6,
    epochs: int = 2,
    ckpt_path: str | None = None,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    """Fit a task quietly, on so many batches an epoch for each process, with a Trainer of some kind."""
    settings: dict[str, Any] = {
        "max_epochs": epochs,
        "default_root_dir": str(root),
        "callbacks": callbacks,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": None if callbacks else False,
        "num_sanity_val_steps": 0,
        "seed": 1,
    }
    trainer = kind(**{**settings, **options})
    trainer.fit(task, rows(batches, trainer.world_size), ckpt_path=ckpt_path)
    return trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Everything that an optimizer step changes."""
    assert trainer.task is not None
    return {
        "weights": [parameter.detach().clone() for parameter in trainer.task.parameters()],
        "momentum": [entry["momentum_buffer"].clone() for entry in trainer.optimizers[0].state.values()],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "step": trainer.global_step,
    }
