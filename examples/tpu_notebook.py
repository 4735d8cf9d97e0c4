"""The cells of a notebook on a TPU: the model is made outside and passed in, bf16, and evaluation in one shape.

    python examples/tpu_notebook.py
    PJRT_DEVICE=CPU python examples/tpu_notebook.py     # XLA on this machine's processor

Each cell could stand in a notebook as it is.
"""

# %% what every cell uses
from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import Accelerator, notebook_launcher, set_seed


# %% the data: the batches of both loaders have one shape each, so that nothing is compiled twice
def make_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    data = load_digits()
    images = TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))
    train, test = random_split(images, [1497, 300], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(test, 64)


# %% the model: made once, before any process is forked, so that all begin with the same weights
def make_model() -> nn.Module:
    set_seed(42)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# %% the training: everything that touches a device is inside
def train(model: nn.Module, epochs: int, batch_size: int, lr: float) -> None:
    accelerator = Accelerator()  # bf16, as the launcher was told
    train_loader, test_loader = make_loaders(batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    steps = epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    for epoch in range(epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()

        model.eval()
        right = seen = 0
        for x, y in test_loader:
            with torch.no_grad():
                guesses = model(x).argmax(dim=-1)
            guesses, y = accelerator.gather_for_metrics((guesses, y))  # without the rows that fill up the last batch
            right += int((guesses == y).sum())
            seen += len(y)
        accelerator.print(f"epoch {epoch + 1:2d}  test accuracy {right / seen:.1%} of {seen} images")


# %% the launch: forked where there are several processes, so the model needs no file
@click.command()
@click.option("--epochs", default=5, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Images of each step, for each process.")
@click.option("--lr", default=1e-2, show_default=True)
@click.option("--num-processes", type=int, help="One for each device; 1 for one that drives all. Default: as fits.")
def main(epochs: int, batch_size: int, lr: float, num_processes: int | None) -> None:
    model = make_model()
    notebook_launcher(train, (model, epochs, batch_size, lr), num_processes=num_processes, mixed_precision="bf16")


if __name__ == "__main__":
    main()
