"""A command line for a training script: digits, with options for everything and a configuration file.

python examples/command_line.py fit --config examples/command_line.yaml --model.width 64
python examples/command_line.py test --config examples/command_line.yaml --ckpt_path CHECKPOINT
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import DataModule, Task, TrainerCLI


class Digits(DataModule):
    """Hand-written digits of scikit-learn.

    Args:
        batch_size: Images of a batch.
        held_out: The share that is not trained on.
    """

    def __init__(self, batch_size: int = 64, held_out: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.held_out = batch_size, held_out

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
        shares = [1 - self.held_out, self.held_out]
        self.train, self.held = random_split(data, shares, torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.held, batch_size=256)

    test_dataloader = val_dataloader


class Classifier(Task):
    """A network with one hidden layer.

    Args:
        width: Units of the hidden layer.
        activation: What follows the hidden layer.
        lr: The learning rate.
    """

    def __init__(self, width: int = 32, activation: type[nn.Module] = nn.ReLU, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, width), activation(), nn.Linear(width, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(1) == labels).float().mean(), prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    TrainerCLI(Classifier, Digits)
