"""Save every so many steps or at each epoch, and resume from any of these checkpoints, also in the middle of an epoch.

    python examples/by_feature/checkpointing.py --every 20 --output run
    drivetrain launch --num_processes 2 examples/by_feature/checkpointing.py --every epoch --output run
    drivetrain launch --num_processes 2 examples/by_feature/checkpointing.py --output run --resume run/step_60

A checkpoint has the model, the optimizer, the scheduler, random states and the order of the data. It may be of another
number of processes. `skip_first_batches` leaves out what the interrupted epoch has trained on already.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from torch.utils.data import DataLoader

from drivetrain import Accelerator


class Progress:
    """Where the run is; `register_for_checkpointing` takes any object with these two methods."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@click.command()
@click.option("--every", default="epoch", show_default=True, help="Steps between two checkpoints, or epoch.")
@click.option("--output", type=click.Path(path_type=Path), default="checkpoints", show_default=True)
@click.option("--resume", type=click.Path(path_type=Path), help="The checkpoint to continue from.")
@click.option("--epochs", default=4, show_default=True)
@click.option("--stop-after", type=int, help="End after so many steps, as an interruption would.")
def main(every: str, output: Path, resume: Path | None, epochs: int, stop_after: int | None) -> None:
    accelerator = Accelerator(split_batches=True)
    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader, test_loader = DataLoader(train, 32, shuffle=True, generator=shuffled), DataLoader(test, 64)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.5)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if resume is not None:
        accelerator.load_state(resume)

    first_epoch, first_batch = divmod(progress.step, len(train_loader))
    for epoch in range(first_epoch, epochs):
        model.train()
        left = first_batch if epoch == first_epoch else 0
        for images, labels in accelerator.skip_first_batches(train_loader, left) if left else train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            progress.step += 1
            if every != "epoch" and progress.step % int(every) == 0:
                accelerator.save_state(output / f"step_{progress.step}")
            if progress.step == stop_after:
                accelerator.print(f"stopped after {progress.step} steps")
                return
        if every == "epoch":
            accelerator.save_state(output / f"epoch_{epoch + 1}")
    accuracy = accuracy_of(accelerator, model, test_loader)
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"{progress.step} steps: last loss {loss.item():.6f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
