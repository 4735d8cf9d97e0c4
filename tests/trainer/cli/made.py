"""Tasks, data and a way to run a command line, for the tests of `drivetrain.trainer.cli`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import DataModule, Task, TrainerCLI
from drivetrain.trainer.cli import LRSchedulerCallable, OptimizerCallable

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "max_epochs": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Line(Task):
    """A line through the origin.

    Args:
        lr: The learning rate.
        width: How many outputs it has.
    """

    def __init__(self, lr: float = 0.1, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layer = nn.Linear(1, width, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Deep(Line):
    """A line that takes one more argument.

    Args:
        depth: How deep it is.
        lr: The learning rate.
    """

    def __init__(self, depth: int, lr: float = 0.2) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.depth = depth


class Injected(Line):
    """A line whose parts are given to it."""

    def __init__(
        self,
        activation: nn.Module,
        optimizer: OptimizerCallable = torch.optim.Adam,
        schedule: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.activation, self.optimizer, self.schedule = activation, optimizer, schedule

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [self.schedule(optimizer)]


class Ones(DataModule):
    """Batches of ones.

    Args:
        batch_size: Of every batch.
    """

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.width = 3

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 1), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def command(*args: str, model: Any = Line, data: Any = Ones, kind: type[TrainerCLI] = TrainerCLI, **kwargs: Any) -> Any:
    """Run a command line on a quiet Trainer; its configuration is not saved unless that is asked for."""
    kwargs.setdefault("save_config_callback", None)
    kwargs["trainer_defaults"] = {**QUIET, **kwargs.get("trainer_defaults", {})}
    return kind(model, data, args=list(args), **kwargs)
