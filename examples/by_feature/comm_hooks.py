"""Send gradients in 16 bits, or as low-rank factors, by a communication hook of DDP.

    drivetrain launch --num_processes 2 examples/by_feature/comm_hooks.py --hook fp16
    drivetrain launch --num_processes 2 examples/by_feature/comm_hooks.py --hook powersgd

On one process nothing is sent, and the hook has no effect.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from torch.utils.data import DataLoader

from drivetrain import DDP, Accelerator

OPTIONS = {"powersgd": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 10}}


@click.command()
@click.option("--hook", type=click.Choice(["none", "fp16", "bf16", "powersgd"]), default="fp16", show_default=True)
@click.option("--epochs", default=4, show_default=True)
def main(hook: str, epochs: int) -> None:
    strategy = DDP() if hook == "none" else DDP(comm_hook=hook, comm_hook_options=OPTIONS.get(hook))
    accelerator = Accelerator(split_batches=True, strategy=strategy)
    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader, test_loader = DataLoader(train, 32, shuffle=True, generator=shuffled), DataLoader(test, 64)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for _ in range(epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
    accuracy = accuracy_of(accelerator, model, test_loader)
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"last loss {loss.item():.6f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
