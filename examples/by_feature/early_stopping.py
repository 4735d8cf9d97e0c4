"""Stop early on all processes at once, where any of them finds a reason.

    drivetrain launch --num_processes 2 examples/by_feature/early_stopping.py --below 0.3

A process that left the loop by itself would leave the others waiting in a collective. `set_trigger` sets a flag on one
process; `check_trigger` is True on all of them if it is set on any.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from torch.utils.data import DataLoader

from drivetrain import Accelerator


@click.command()
@click.option("--below", default=0.3, show_default=True, help="The loss of a process that ends the run.")
@click.option("--patience", default=3, show_default=True, help="Steps in a row.")
@click.option("--epochs", default=10, show_default=True)
def main(below: float, patience: int, epochs: int) -> None:
    accelerator = Accelerator(split_batches=True)
    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader, test_loader = DataLoader(train, 32, shuffle=True, generator=shuffled), DataLoader(test, 64)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    steps = low = 0
    for images, labels in (batch for _ in range(epochs) for batch in train_loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        steps += 1
        low = low + 1 if loss.item() < below else 0  # this process's own loss
        if low == patience:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    everyone = accelerator.gather(torch.tensor([steps], device=accelerator.device)).tolist()
    accuracy = accuracy_of(accelerator, model, test_loader)
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"steps of each process: {everyone}")
    accelerator.print(f"last loss {loss.item():.6f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
