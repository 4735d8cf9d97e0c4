"""Local SGD: each process steps by itself, and parameters are averaged every few steps instead of gradients in each.

    drivetrain launch --num_processes 2 examples/by_feature/local_sgd.py --every 8

For slow links between processes. The losses are not those of one process; the model learns nearly as well.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from torch.utils.data import DataLoader

from drivetrain import Accelerator, LocalSGD


@click.command()
@click.option("--every", default=8, show_default=True, help="Steps between two averages.")
@click.option("--epochs", default=5, show_default=True)
def main(every: int, epochs: int) -> None:
    accelerator = Accelerator(split_batches=True)
    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader, test_loader = DataLoader(train, 32, shuffle=True, generator=shuffled), DataLoader(test, 64)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    with LocalSGD(accelerator, model, local_sgd_steps=every) as local:
        for _ in range(epochs):
            model.train()
            for images, labels in train_loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                local.step()
    # When the context ends, all processes have the same parameters.
    norms = accelerator.gather(torch.stack([p.detach().norm() for p in model.parameters()]).norm()[None])
    accuracy = accuracy_of(accelerator, model, test_loader)
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"norm of the parameters on each process: {norms.tolist()}")
    accelerator.print(f"last loss {loss.item():.6f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
