"""A script for Lightning, sound or with one planted mistake: `verify --as lightning lightning_task.py CASE`."""

from __future__ import annotations

import os
import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = sys.argv[1]


class Embed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self(x), self(x + 0.1 * torch.randn_like(x))
        if CASE == "contrastive":
            loss = F.cross_entropy(first @ second.T * self.scale.exp(), torch.arange(len(x)))
        else:
            loss = (self.scale.exp() * (first - second).square().sum(1)).mean() + F.mse_loss(first[:, 0], y)
        if CASE == "divided":
            loss = loss / self.trainer.world_size
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def main() -> None:
    if CASE != "epochs_without_a_seed":
        L.seed_everything(int(os.environ.get("VERIFY_SEED", "3")))
    x = torch.randn(32 if CASE == "epochs_without_a_seed" else 96, 10, generator=torch.Generator().manual_seed(4))
    loader = DataLoader(TensorDataset(x, x[:, 0].tanh()), 8, shuffle=True)
    trainer = L.Trainer(max_epochs=3, limit_train_batches=4, gradient_clip_val=1.0 if CASE == "clipped" else None)
    trainer.fit(Embed(), loader)


if __name__ == "__main__":
    main()
