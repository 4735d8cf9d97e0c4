"""Begin with a batch size that is too large, and take smaller ones until the memory suffices.

    python examples/by_feature/automatic_batch_size.py --spare 600
    drivetrain launch --num_processes 2 examples/by_feature/automatic_batch_size.py --spare 600

Each process tries a step by itself, and all take the smallest size that was found: a process that tried again while
others are in a collective would leave them waiting. Whatever needs memory is made inside the function, so an attempt
that failed leaves nothing behind. `--spare` caps the memory of each process at what it has now and so many MB more (on
Linux), to show anywhere what a full machine does.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, split_images
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, find_executable_batch_size

WIDTH = 65536  # 256 KB of activations for each image and layer


def make_wide_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def cap_memory(spare: int) -> None:
    """Let this process have so many MB more than it has now."""
    import resource

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare * 2**20, resource.RLIM_INFINITY))


@click.command()
@click.option("--batch-size", default=1024, show_default=True, help="Images of each process to begin with.")
@click.option("--spare", type=int, help="MB of memory that are left to each process.")
@click.option("--epochs", default=2, show_default=True)
def main(batch_size: int, spare: int | None, epochs: int) -> None:
    accelerator = Accelerator()
    train, test = split_images()
    accelerator.gather(torch.zeros(1, device=accelerator.device))  # what processes share is set up before the cap
    if spare is not None:
        cap_memory(spare)

    @find_executable_batch_size(starting_batch_size=batch_size, reduce_batch_size_fn=lambda size: size // 4)
    def size_that_fits(batch_size: int) -> int:
        accelerator.print(f"trying {batch_size} images")
        model = make_wide_model().to(accelerator.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images = torch.rand(batch_size, 64, device=accelerator.device)
        F.cross_entropy(model(images), torch.zeros(batch_size, dtype=torch.long, device=accelerator.device)).backward()
        optimizer.step()
        return batch_size

    found = torch.tensor([size_that_fits()], device=accelerator.device)
    batch_size = int(accelerator.reduce(found, "min"))  # one size for all
    model = make_wide_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-4, momentum=0.9)
    shuffled = torch.Generator().manual_seed(0)
    loader = DataLoader(train, batch_size, shuffle=True, generator=shuffled)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, DataLoader(test, 64))
    for _ in range(epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
    accuracy = accuracy_of(accelerator, model, test_loader)
    loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"trained with {batch_size} images: last loss {loss:.6f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
