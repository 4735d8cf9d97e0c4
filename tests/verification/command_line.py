"""A task with a command line: `python command_line.py fit`, or `in_code` for arguments in the code."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, TrainerCLI


class Line(Task):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"a width of {width} is odd")
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1))), 8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


if __name__ == "__main__":
    in_code = ["fit", "--trainer.max_epochs=2"]
    TrainerCLI(Line, args=in_code if sys.argv[1] == "in_code" else None)
