"""Profile some steps with torch's profiler, and write a trace for each process.

    drivetrain launch --num_processes 2 examples/by_feature/profiler.py --output traces

Open the traces with Perfetto (https://ui.perfetto.dev).
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from torch.utils.data import DataLoader

from drivetrain import Accelerator, ProfileKwargs


@click.command()
@click.option("--steps", default=5, show_default=True, help="Steps that are profiled, after the first epoch.")
@click.option("--output", default="traces", show_default=True)
@click.option("--epochs", default=4, show_default=True)
def main(steps: int, output: str, epochs: int) -> None:
    profile = ProfileKwargs(activities=["cpu"], profile_memory=True, record_shapes=True, output_trace_dir=output)
    accelerator = Accelerator(split_batches=True, kwargs_handlers=[profile])
    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader, test_loader = DataLoader(train, 32, shuffle=True, generator=shuffled), DataLoader(test, 64)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    for _ in range(epochs):
        for images, labels in train_loader:
            loss = step(images, labels)
    accuracy = accuracy_of(accelerator, model, test_loader)
    loss = accelerator.reduce(loss, "mean")
    accelerator.print(f"last loss {loss.item():.6f}, test accuracy {accuracy:.1%}")

    model.train()
    with accelerator.profile() as profiler:
        for _, (images, labels) in zip(range(steps), train_loader, strict=False):
            step(images, labels)
    products = sum(event.count for event in profiler.key_averages() if event.key == "aten::addmm")
    accelerator.print(f"{products} products in the forwards of {steps} steps")
    accelerator.print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))


if __name__ == "__main__":
    main()
