"""Image classification with augmentation: scanned digits, rotated, scaled and shifted at random.

    python examples/gallery/classification.py
    drivetrain launch --num_processes 2 examples/gallery/classification.py

The data are scikit-learn's 1797 digits of 8x8 pixels. The best checkpoint by validation accuracy is tested.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from drivetrain import CSVLogger, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Task, Trainer


class Digits(Dataset):
    """Images 1x8x8 in [0, 1] and their labels; with `augment`, each image is transformed at random.

    In a run with a seed every sample has a random state of its own, so processes and workers do not matter.
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: bool = False) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return (transform(image) if self.augment else image), self.labels[index]


def transform(image: Tensor) -> Tensor:
    """Rotate by up to 15 degrees, scale by up to 10 %, shift by up to one pixel."""
    angle, scale = (torch.rand(()) - 0.5) * math.pi / 6, 1 + (torch.rand(()) - 0.5) / 5
    shift = (torch.rand(2) - 0.5) / 2  # the image reaches from -1 to 1
    rows = [[angle.cos() * scale, -angle.sin() * scale, shift[0]], [angle.sin() * scale, angle.cos() * scale, shift[1]]]
    grid = F.affine_grid(torch.tensor([rows]), [1, 1, 8, 8], align_corners=False)
    return F.grid_sample(image[None], grid, align_corners=False)[0]


def load_parts() -> tuple[Digits, Digits, Digits]:
    """1257 images to train on, 270 to validate and 270 to test, always the same."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train, val, test = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).split([1257, 270, 270])
    return Digits(images[train], labels[train], augment=True), *(Digits(images[p], labels[p]) for p in (val, test))


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]


class Classifier(Task):
    """A convolutional network, trained with a one-cycle schedule over all steps of the run."""

    def __init__(self, width: int = 32, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            *(*convolution(1, width), *convolution(width, width), nn.MaxPool2d(2), *convolution(width, 2 * width)),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * width, 10)),
        )
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(10, average="micro") for _ in range(3)
        )
        self.confusion = MulticlassConfusionMatrix(10)

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.test_accuracy(logits, labels)
        self.confusion.update(logits, labels)
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@click.command()
@click.option("--small", is_flag=True, help="Few epochs, to see that it runs.")
@click.option("--output", default="classification", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    train, val, test = load_parts()
    trainer = Trainer(
        max_epochs=2 if small else 40,
        seed=0,
        logger=CSVLogger(output, name="run"),
        log_every_n_steps=10,
        default_root_dir=output,
        callbacks=[
            ModelCheckpoint(monitor="val_accuracy", mode="max", filename="{epoch}"),
            EarlyStopping("val_loss", patience=15),
            LearningRateMonitor(),
        ],
    )
    task = Classifier()
    trainer.fit(task, DataLoader(train, 64, shuffle=True), DataLoader(val, 135))
    [results] = trainer.test(task, DataLoader(test, 135), ckpt_path="best")
    guesses = torch.cat(trainer.predict(task, DataLoader(test, 135), ckpt_path="best"))
    wrong = [[int(test.labels[i]), int(guesses[i])] for i in (guesses != test.labels).nonzero().flatten()]
    trainer.print(f"test accuracy {results['test_accuracy']:.1%}; mistaken, as (digit, guess): {wrong}")
    if trainer.is_global_zero:
        confusion = task.confusion.compute().tolist()
        (output / "results.json").write_text(
            json.dumps({**results, "confusion": confusion, "epochs": trainer.current_epoch})
        )


if __name__ == "__main__":
    main()
