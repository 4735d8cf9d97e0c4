"""Detection as a multi-task problem: which digit is on a photograph, and the box around it.

    python examples/gallery/detection.py

Each canvas is a piece of one of the two photographs that come with scikit-learn, with one of its scanned digits
pasted on it in a light colour and some size. One network has two heads, one for the class and one for the box; the
losses are weighted and added.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from matplotlib.image import imsave
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import CSVLogger, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Task, Trainer

SIZE = 28


class Canvases(Dataset):
    """Canvases (3, 28, 28), the digit on each, and its box in [0, 1]; always the same ones with `seed`."""

    def __init__(self, digits: range, count: int, seed: int | None = None) -> None:
        self.photographs = [torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images]
        data = load_digits()
        self.digits = torch.tensor(data.images[digits], dtype=torch.float32)[:, None, None] / 16
        self.labels, self.count, self.seed = torch.tensor(data.target[digits]), count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed + index)

        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        photograph = self.photographs[draw(2)]
        top, left = draw(photograph.shape[1] - SIZE), draw(photograph.shape[2] - SIZE)
        canvas = 0.6 * photograph[:, top : top + SIZE, left : left + SIZE]
        which, size = draw(len(self.digits)), 10 + draw(9)
        top, left = draw(SIZE - size + 1), draw(SIZE - size + 1)
        ink = F.interpolate(self.digits[which], size, mode="bilinear")[0]
        colour = 0.7 + 0.3 * torch.rand(3, 1, 1, generator=generator)
        place = canvas[:, top : top + size, left : left + size]
        place.mul_(1 - ink).add_(colour * ink)
        return canvas, self.labels[which], torch.tensor([left, top, left + size, top + size]) / SIZE


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """The intersection over union of boxes (rows, 4), row by row."""
    both = torch.cat([torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])], dim=1)
    inner, area_a, area_b = ((box[:, 2:] - box[:, :2]).clamp(min=0).prod(1) for box in (both, a, b))
    return inner / (area_a + area_b - inner)


class Detector(Task):
    def __init__(self, width: int = 24, lr: float = 3e-3, box_weight: float = 10.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = []
        for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        self.trunk = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 9, 128), nn.ReLU())
        self.digit, self.box = nn.Linear(128, 10), nn.Linear(128, 4)
        self.accuracy = nn.ModuleDict({part: MulticlassAccuracy(10) for part in ("val", "test")})
        self.iou = nn.ModuleDict({part: MeanMetric() for part in ("val", "test")})

    def forward(self, canvases: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (rows, 10) of the digit, and its box (rows, 4)."""
        shared = self.trunk(canvases)
        return self.digit(shared), self.box(shared).sigmoid()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        canvases, labels, boxes = batch
        logits, found = self(canvases)
        digit_loss, box_loss = F.cross_entropy(logits, labels), F.l1_loss(found, boxes)
        loss = digit_loss + self.hparams["box_weight"] * box_loss
        self.log_dict(
            {"digit_loss": digit_loss, "box_loss": box_loss, "train_loss": loss}, on_step=False, on_epoch=True
        )
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        canvases, labels, boxes = batch
        logits, found = self(canvases)
        self.accuracy[part].update(logits, labels)
        self.iou[part].update(overlap(found, boxes))
        self.log_dict({f"{part}_accuracy": self.accuracy[part], f"{part}_iou": self.iou[part]}, prog_bar=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        return self(batch[0])

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def draw_box(picture: Tensor, box: Tensor, colour: tuple[int, int, int]) -> None:
    left, top, right, bottom = (box * (picture.shape[-1] - 1)).round().int().tolist()
    for down, along in ((slice(top, bottom + 1), [left, right]), ([top, bottom], slice(left, right + 1))):
        picture[:, down, along] = torch.tensor(colour, dtype=picture.dtype)[:, None, None]


@click.command()
@click.option("--small", is_flag=True, help="A few steps, to see that it runs.")
@click.option("--output", default="detection", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    train = Canvases(range(1297), count=512 if small else 1920)
    val, test = Canvases(range(1297, 1547), 256, seed=10_000), Canvases(range(1547, 1797), 256, seed=20_000)
    best = ModelCheckpoint(monitor="val_iou", mode="max", filename="{epoch}")
    trainer = Trainer(
        max_epochs=3 if small else 16,
        seed=0,
        logger=CSVLogger(output, name="run"),
        log_every_n_steps=20,
        default_root_dir=output,
        callbacks=[best, EarlyStopping("val_iou", mode="max", patience=8), LearningRateMonitor()],
    )
    task = Detector()
    trainer.fit(task, DataLoader(train, 32, shuffle=True), DataLoader(val, 128))
    [results] = trainer.test(task, DataLoader(test, 128), ckpt_path="best")
    _, boxes = trainer.predict(task, DataLoader(test, 128), ckpt_path="best")[0]
    if trainer.is_global_zero:  # the true boxes in white, those found in red
        pictures = [test[i][0].repeat_interleave(4, 1).repeat_interleave(4, 2) for i in range(8)]
        for i, picture in enumerate(pictures):
            draw_box(picture, test[i][2], (1, 1, 1))
            draw_box(picture, boxes[i], (1, 0, 0))
        imsave(output / "canvases.png", torch.cat(pictures, dim=2).permute(1, 2, 0).numpy())
        (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
