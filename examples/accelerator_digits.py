"""A plain PyTorch loop, and the four lines that let it run on any number of processes and devices.

    python examples/accelerator_digits.py
    drivetrain launch --num_processes 2 examples/accelerator_digits.py

The changed lines are marked. Without them this is how one would write it for one process.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import Accelerator


@click.command()
@click.option("--epochs", default=10, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Images of each step, for each process.")
@click.option("--lr", default=2e-3, show_default=True)
def main(epochs: int, batch_size: int, lr: float) -> None:
    accelerator = Accelerator()  # 1: which process and device this is

    torch.manual_seed(0)
    data = load_digits()
    images = TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))
    train, test = random_split(images, [1497, 300])
    train_loader, test_loader = DataLoader(train, batch_size, shuffle=True), DataLoader(test, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    model, optimizer, train_loader, test_loader = accelerator.prepare(  # 2: places the model, shares out the data
        model, optimizer, train_loader, test_loader
    )

    for epoch in range(epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)  # 3: in place of loss.backward()
            optimizer.step()

        model.eval()
        right = seen = 0
        for x, y in test_loader:
            with torch.no_grad():
                guesses = model(x).argmax(dim=1)
            guesses, y = accelerator.gather_for_metrics((guesses, y))  # 4: those of all processes, each sample once
            right += (guesses == y).sum().item()
            seen += len(y)
        accelerator.print(f"epoch {epoch + 1:2d}  test accuracy {right / seen:.1%} of {seen} images")


if __name__ == "__main__":
    main()
