"""Draw the picture of a learning-rate search on the page about tuning: `python docs/hooks/learning_rate_plot.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer, Tuner, set_seed

PICTURE = Path(__file__).parent.parent / "images" / "learning_rate_search.png"


class Regression(Task):
    """A small network on a sum."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def draw() -> None:
    """Search, and write the picture."""
    set_seed(0)
    x = torch.randn(4096, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    found = Tuner(trainer).lr_find(Regression(), loader, min_lr=1e-5, max_lr=10.0)
    assert found is not None
    figure = found.plot(suggest=True)
    figure.set_size_inches(6.4, 4.0)
    figure.savefig(PICTURE, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw()
