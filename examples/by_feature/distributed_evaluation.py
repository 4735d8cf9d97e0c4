"""Evaluate on all processes, with the figures of one: each sample counts once.

    drivetrain launch --num_processes 2 examples/by_feature/distributed_evaluation.py

So that all processes take part in the last batch, it is filled up with samples from the start. `gather_for_metrics`
drops exactly those. `gather` would keep them, and the figures would depend on the number of processes.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import TEST, make_model, split_images
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader

from drivetrain import Accelerator


@click.command()
@click.option("--epochs", default=3, show_default=True)
def main(epochs: int) -> None:
    accelerator = Accelerator(split_batches=True)
    train, test = split_images()
    shuffled = torch.Generator().manual_seed(0)
    train_loader, test_loader = DataLoader(train, 32, shuffle=True, generator=shuffled), DataLoader(test, 24)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()

        model.eval()
        guesses, truth, losses = [], [], []
        for images, labels in test_loader:
            with torch.no_grad():
                logits = model(images)
            each = F.cross_entropy(logits, labels, reduction="none")  # one loss for each sample
            guessed, labels, each = accelerator.gather_for_metrics((logits.argmax(dim=1), labels, each))
            guesses.append(guessed)
            truth.append(labels)
            losses.append(each)
        guesses, truth, losses = torch.cat(guesses).cpu(), torch.cat(truth).cpu(), torch.cat(losses)
        assert len(truth) == TEST  # each image once, whatever the number of processes
        accelerator.print(
            f"epoch {epoch + 1}: last loss {losses.mean().item():.6f}, "
            f"test accuracy {(guesses == truth).float().mean().item():.1%}, "
            f"F1 {f1_score(truth, guesses, average='macro'):.4f}"
        )


if __name__ == "__main__":
    main()
