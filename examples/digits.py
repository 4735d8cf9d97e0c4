"""Train a small convolutional network on scanned digits: the Trainer, from the data to a test of the best checkpoint.

    python examples/digits.py
    drivetrain launch --num_processes 2 examples/digits.py

The data are the 1797 images of 8x8 pixels that come with scikit-learn. Everything is written below `--output`:
checkpoints, `metrics.csv`, TensorBoard's event files and `curves.png`.
"""

from __future__ import annotations

import csv
import math
import re
import time
from pathlib import Path

import click
import psutil
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import (
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    Task,
    TensorBoardLogger,
    TQDMProgressBar,
    Trainer,
)


class Digits(Dataset):
    """Some of the images, 1x8x8 with values from 0 to 1, and their labels.

    With `shift`, each image is moved by up to so many pixels each way. In a run with a seed, every sample has a random
    state of its own, so the shifts are the same with any number of processes and workers.
    """

    def __init__(self, images: Tensor, labels: Tensor, shift: int = 0) -> None:
        self.images, self.labels, self.shift = images, labels, shift

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.shift:
            down, right = torch.randint(0, 2 * self.shift + 1, (2,)).tolist()
            image = F.pad(image, [self.shift] * 4)[:, down : down + 8, right : right + 8]
        return image, self.labels[index]


def load_parts() -> tuple[Digits, Digits, Digits]:
    """1257 images to train on, 270 to validate and 270 to test, always the same."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val, test = order.split([len(order) - 540, 270, 270])
    return (
        Digits(images[train], labels[train], shift=1),
        Digits(images[val], labels[val]),
        Digits(images[test], labels[test]),
    )


class DigitClassifier(Task):
    """Two blocks of convolutions and a linear layer, trained with a one-cycle schedule of `steps` steps."""

    def __init__(self, lr: float, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            *convolutions(1, 32),
            *convolutions(32, 32),
            nn.MaxPool2d(2),
            *convolutions(32, 64),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 2 * 2, 10),
        )
        # One for each part of the data: the Trainer computes them over all processes, each sample counted once.
        self.accuracy = nn.ModuleDict({f"{part}_accuracy": MulticlassAccuracy(10, average="micro") for part in PARTS})

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.evaluate(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: tuple[Tensor, Tensor], part: str) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy = self.accuracy[f"{part}_accuracy"]
        accuracy.update(logits, labels)
        self.log(f"{part}_loss", loss, on_step=False, on_epoch=True)
        self.log(f"{part}_accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams["lr"], total_steps=self.hparams["steps"]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


PARTS = ("train", "val", "test")


def convolutions(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]


def draw_curves(metrics: Path, picture: Path, best_epoch: int, test_accuracy: float) -> None:
    """Draw loss and accuracy over the epochs from what the CSVLogger wrote."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, MultipleLocator, PercentFormatter

    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for axes, name in zip(panels, ("loss", "accuracy"), strict=True):
        for part, label, color in (("train", "train, shifted images", "#4c78a8"), ("val", "validation", "#f58518")):
            values = {int(row["epoch"]): float(row[f"{part}_{name}"]) for row in rows if row.get(f"{part}_{name}")}
            axes.plot(*zip(*values.items(), strict=True), color=color, label=label, marker="o", markersize=3.5)
        axes.axvline(best_epoch, color="#9a9a9a", linestyle=":", label=f"best checkpoint, epoch={best_epoch}")
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    losses, accuracies = panels
    losses.set(title="Loss", ylabel="cross-entropy, log scale", yscale="log")
    accuracies.set(title="Accuracy", ylabel="images classified correctly")
    accuracies.axhline(test_accuracy, color="#54a24b", linestyle="--", label=f"test of the best, {test_accuracy:.1%}")
    accuracies.set_ylim(min(0.8, test_accuracy - 0.1), 1.005)
    accuracies.yaxis.set_major_locator(MultipleLocator(0.05))
    accuracies.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(*accuracies.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(picture, dpi=130)


@click.command()
@click.option("--epochs", default=20, show_default=True, help="At most so many; it stops early when nothing improves.")
@click.option("--batch-size", default=64, show_default=True, help="Images of each step, over all processes.")
@click.option("--lr", default=2e-3, show_default=True, help="Highest learning rate of the schedule.")
@click.option("--output", default="demo", show_default=True, type=click.Path(path_type=Path), help="Where to write.")
def main(epochs: int, batch_size: int, lr: float, output: Path) -> None:
    csv_logger = CSVLogger(output, name="csv")
    best = ModelCheckpoint(monitor="val_loss", filename="{epoch}")
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=[TQDMProgressBar(), EarlyStopping("val_loss", patience=6), best],
        logger=[csv_logger, TensorBoardLogger(output, name="tensorboard")],
        default_root_dir=output,
        seed=0,
    )
    train, val, test = load_parts()
    task = DigitClassifier(lr, steps=epochs * math.ceil(len(train) / batch_size))
    each = max(1, batch_size // trainer.world_size)  # what one process takes of it

    started = time.perf_counter()
    trainer.fit(task, DataLoader(train, each, shuffle=True), DataLoader(val, 135))
    training = time.perf_counter() - started
    [results] = trainer.test(task, DataLoader(test, 135), ckpt_path="best")

    if trainer.is_global_zero:
        csv_logger.save()
        # From 0, as in the checkpoint's name, in the bar and in the table.
        best_epoch = int(re.findall(r"epoch=(\d+)", best.best_model_path)[-1])
        accuracy = results["test_accuracy"]
        draw_curves(Path(csv_logger.log_dir) / "metrics.csv", output / "curves.png", best_epoch, accuracy)
        wall = time.time() - psutil.Process().create_time()
        seen = trainer.current_epoch * len(train)
        processes = "1 process" if trainer.world_size == 1 else f"{trainer.world_size} processes"
        print(f"test accuracy   {accuracy:.1%}, with the best checkpoint, epoch={best_epoch}")
        print(f"wall time       {wall:.1f} s since the process started, {training:.1f} s of them training")
        print(f"throughput      {seen / training:,.0f} samples/s, with {processes}")
        print(f"curves          {(output / 'curves.png').resolve()}")


if __name__ == "__main__":
    main()
