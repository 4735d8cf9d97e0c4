"""Begin with a batch size that is too large, and take smaller ones until the memory suffices.

    python examples/by_feature/automatic_batch_size.py --spare 220
    drivetrain launch --num_processes 2 examples/by_feature/automatic_batch_size.py --spare 220

Whatever needs memory is made inside the function, so that an attempt that failed leaves nothing behind. `--spare` caps
the memory of each process at what it has now and so many MB more (on Linux), to show anywhere what a full machine does.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, split_images
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, find_executable_batch_size

WIDTH = 16384  # 64 KB of activations for each image and layer


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
    def fit(batch_size: int) -> tuple[int, float, float]:
        accelerator.free_memory()
        accelerator.print(f"trying {batch_size} images")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
        loss = accelerator.reduce(loss.detach(), "mean").item()
        return batch_size, loss, accuracy_of(accelerator, model, test_loader)

    batch_size, loss, accuracy = fit()
    accelerator.print(f"trained with {batch_size} images: last loss {loss:.6f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
