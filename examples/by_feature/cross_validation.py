"""Cross-validation: a model for each fold, and the mean of their outputs on images that none has seen.

    drivetrain launch --num_processes 2 examples/by_feature/cross_validation.py

`free_memory` releases what a fold has prepared, so that the next one begins as the first did.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from digits_data import accuracy_of, make_model, split_images
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader, Subset

from drivetrain import Accelerator


@click.command()
@click.option("--folds", default=3, show_default=True)
@click.option("--epochs", default=5, show_default=True)
def main(folds: int, epochs: int) -> None:
    accelerator = Accelerator(split_batches=True)
    train, test = split_images()
    digits = [int(label) for _, label in train]
    outputs = []
    for fold, (chosen, held_out) in enumerate(StratifiedKFold(folds).split(digits, digits)):
        shuffled = torch.Generator().manual_seed(fold)
        loader = DataLoader(Subset(train, chosen), 32, shuffle=True, generator=shuffled, drop_last=True)
        validation, test_loader = DataLoader(Subset(train, held_out), 64), DataLoader(test, 64)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer, loader, validation, test_loader = accelerator.prepare(
            model, optimizer, loader, validation, test_loader
        )
        for _ in range(epochs):
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
        accelerator.print(f"fold {fold + 1}: validation accuracy {accuracy_of(accelerator, model, validation):.1%}")
        logits, labels = [], []
        with torch.no_grad():
            for images, answers in test_loader:
                gathered = accelerator.gather_for_metrics((model(images), answers))
                logits.append(gathered[0])
                labels.append(gathered[1])
        outputs.append(torch.cat(logits))
        loss = accelerator.reduce(loss.detach(), "mean")
        model, optimizer, loader, validation, test_loader = accelerator.free_memory(
            model, optimizer, loader, validation, test_loader
        )
    guesses = torch.stack(outputs).mean(0).argmax(dim=1)
    accuracy = (guesses == torch.cat(labels)).float().mean()
    accelerator.print(f"last loss {loss.item():.6f}, test accuracy {accuracy.item():.1%}")


if __name__ == "__main__":
    main()
