"""Log values to experiment trackers, several at once.

    python examples/by_feature/tracking.py --output run
    drivetrain launch --num_processes 2 examples/by_feature/tracking.py --log-with csv --log-with tensorboard

`log` may be called on all processes: the main one writes. The trackers are opened with the run's hyper-parameters, and
closed by `end_training`.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from torch.utils.data import DataLoader

from drivetrain import Accelerator


@click.command()
@click.option("--log-with", multiple=True, default=["csv"], show_default=True, help="Names of trackers.")
@click.option("--output", default="tracking", show_default=True)
@click.option("--epochs", default=3, show_default=True)
@click.option("--lr", default=2e-3, show_default=True)
def main(log_with: tuple[str, ...], output: str, epochs: int, lr: float) -> None:
    accelerator = Accelerator(split_batches=True, log_with=list(log_with), project_dir=output)
    accelerator.init_trackers("digits", config={"epochs": epochs, "lr": lr})
    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader, test_loader = DataLoader(train, 32, shuffle=True, generator=shuffled), DataLoader(test, 64)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    step = 0
    for epoch in range(epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % 10 == 0:  # reading a loss waits for the device, so not at every step
                accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()}, step=step)
        accuracy = accuracy_of(accelerator, model, test_loader)
        accelerator.log({"accuracy": accuracy, "epoch": epoch + 1}, step=step)
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"last loss {loss.item():.6f}, test accuracy {accuracy:.1%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
