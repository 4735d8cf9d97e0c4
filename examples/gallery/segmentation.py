"""Segmentation: find the ink of scanned digits on photographs, and which digit each pixel belongs to.

    python examples/gallery/segmentation.py

Each canvas is a piece of one of the two photographs that come with scikit-learn, with two of its scanned digits
pasted on it, enlarged, in a light colour. Training canvases are composed again in every epoch; those to validate and
to test are always the same.
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
from torchmetrics.classification import MulticlassJaccardIndex

from drivetrain import CSVLogger, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Task, Trainer

SIZE, DIGIT, BACKGROUND = 32, 14, 10
COLOURS = torch.tensor([[int(f"{hue:06x}"[i : i + 2], 16) for i in (0, 2, 4)] for hue in (
    0xE6194B, 0x3CB44B, 0xFFE119, 0x4363D8, 0xF58231, 0x911EB4, 0x46F0F0, 0xF032E6, 0xBCF60C, 0x9A6324, 0x202020
)])  # fmt: skip


class Canvases(Dataset):
    """Canvases (3, 32, 32) in [0, 1] and the class of each of their pixels: a digit, or 10 for the background.

    With `seed`, canvas `i` is always the same; without, it is drawn from the random state of the sample.
    """

    def __init__(self, digits: range, count: int, seed: int | None = None) -> None:
        self.photographs = [torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images]
        data = load_digits()
        small = torch.tensor(data.images[digits], dtype=torch.float32)[:, None] / 16
        self.digits = F.interpolate(small, DIGIT, mode="bilinear")[:, 0]
        self.labels, self.count, self.seed = data.target[digits].tolist(), count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed + index)

        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        photograph = self.photographs[draw(2)]
        top, left = draw(photograph.shape[1] - SIZE), draw(photograph.shape[2] - SIZE)
        canvas = 0.6 * photograph[:, top : top + SIZE, left : left + SIZE]
        classes = torch.full((SIZE, SIZE), BACKGROUND)
        for half in (0, SIZE // 2):  # one digit to the left, one to the right
            which, top, left = draw(len(self.digits)), draw(SIZE - DIGIT + 1), half + draw(SIZE // 2 - DIGIT + 1)
            ink, colour = self.digits[which], 0.7 + 0.3 * torch.rand(3, 1, 1, generator=generator)
            canvas[:, top : top + DIGIT, left : left + DIGIT].mul_(1 - ink).add_(colour * ink)
            classes[top : top + DIGIT, left : left + DIGIT][ink > 0.4] = self.labels[which]
        return canvas, classes


def block(inputs: int, outputs: int) -> nn.Sequential:
    layers = [[nn.Conv2d(c, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()] for c in (inputs, outputs)]
    return nn.Sequential(*layers[0], *layers[1])


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, width), block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.head = nn.Conv2d(width, 11, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (rows, 11, height, width) of the class of each pixel."""
        fine = self.down[0](images)
        middle = self.down[1](F.max_pool2d(fine, 2))
        coarse = self.down[2](F.max_pool2d(middle, 2))
        x = self.up[0](torch.cat([F.interpolate(coarse, scale_factor=2), middle], 1))
        return self.head(self.up[1](torch.cat([F.interpolate(x, scale_factor=2), fine], 1)))


class Segmentation(Task):
    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = UNet(width)
        self.iou = nn.ModuleDict({part: MulticlassJaccardIndex(11) for part in ("val", "test")})  # a mean over classes

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: tuple[Tensor, Tensor], part: str) -> None:
        logits = self.network(batch[0])
        self.iou[part].update(logits, batch[1])
        self.log(f"{part}_loss", F.cross_entropy(logits, batch[1]))
        self.log(f"{part}_iou", self.iou[part], prog_bar=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0]).argmax(1)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@click.command()
@click.option("--small", is_flag=True, help="A few steps, to see that it runs.")
@click.option("--output", default="segmentation", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    train = Canvases(range(1297), count=128 if small else 1080)
    val, test = Canvases(range(1297, 1547), 128, seed=10_000), Canvases(range(1547, 1797), 128, seed=20_000)
    best = ModelCheckpoint(monitor="val_iou", mode="max", filename="{epoch}")
    trainer = Trainer(
        max_epochs=2 if small else 10,
        seed=0,
        logger=CSVLogger(output, name="run"),
        log_every_n_steps=20,
        default_root_dir=output,
        callbacks=[best, EarlyStopping("val_loss", patience=5), LearningRateMonitor()],
    )
    task = Segmentation()
    trainer.fit(task, DataLoader(train, 16, shuffle=True), DataLoader(val, 64))
    [results] = trainer.test(task, DataLoader(test, 64), ckpt_path="best")
    guesses = torch.cat(trainer.predict(task, DataLoader(test, 64), ckpt_path="best"))
    if trainer.is_global_zero:  # a row of canvases, their classes, and what was found
        canvases, classes = (torch.cat([test[i][part] for i in range(8)], dim=-1) for part in (0, 1))
        found = torch.cat(list(guesses[:8]), dim=-1)
        rows = [canvases.permute(1, 2, 0), COLOURS[classes] / 255, COLOURS[found] / 255]
        imsave(output / "canvases.png", torch.cat(rows).numpy())
        (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
