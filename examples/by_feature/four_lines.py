"""Four lines turn a loop for one device into one for any number of processes and devices.

    python examples/by_feature/four_lines.py
    drivetrain launch --num_processes 2 examples/by_feature/four_lines.py

With `split_batches`, a batch of 32 is 32 images over all processes together, so the losses do not depend on how many
there are.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from torch.utils.data import DataLoader

from drivetrain import Accelerator


@click.command()
@click.option("--epochs", default=5, show_default=True)
def main(epochs: int) -> None:
    accelerator = Accelerator(split_batches=True)  # 1: which process and device this is

    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader, test_loader = DataLoader(train, 32, shuffle=True, generator=shuffled), DataLoader(test, 64)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    model, optimizer, train_loader, test_loader = accelerator.prepare(  # 2: places the model, shares out the data
        model, optimizer, train_loader, test_loader
    )
    for _ in range(epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)  # 3: in place of loss.backward()
            optimizer.step()
    accuracy = accuracy_of(accelerator, model, test_loader)
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"last loss {loss.item():.6f}, test accuracy {accuracy:.1%}")  # 4: once, not once per process


if __name__ == "__main__":
    main()
