"""Accumulate gradients: a global batch of 64 in micro-batches of 16, written as if there were no accumulation.

    drivetrain launch --num_processes 2 examples/by_feature/accumulate.py
    drivetrain launch --num_processes 2 examples/by_feature/accumulate.py --steps 1 --batch-size 64

Both commands train the same model: `backward` normalises by the micro-batches of the window, also by those of a shorter
last one.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from torch.utils.data import DataLoader

from drivetrain import Accelerator


@click.command()
@click.option("--steps", default=4, show_default=True, help="Micro-batches in an optimizer step.")
@click.option("--batch-size", default=16, show_default=True, help="Images in a micro-batch, over all processes.")
@click.option("--epochs", default=6, show_default=True)
def main(steps: int, batch_size: int, epochs: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=steps, split_batches=True)
    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader = DataLoader(train, batch_size, shuffle=True, generator=shuffled)
    test_loader = DataLoader(test, 64)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    optimizer_steps = 0
    for _ in range(epochs):
        model.train()
        epoch_loss = torch.zeros((), device=accelerator.device)
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # the window ends here
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer_steps += 1
                optimizer.step()
                optimizer.zero_grad()
            epoch_loss += loss.detach() / len(train_loader)
    accuracy = accuracy_of(accelerator, model, test_loader)
    loss = accelerator.reduce(epoch_loss, "mean")
    accelerator.print(f"{optimizer_steps} steps: last loss {loss.item():.6f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
