"""Contrastive learning: representations of scanned digits from images without labels.

    python examples/gallery/contrastive.py

SimCLR (Chen et al. 2020, https://arxiv.org/abs/2002.05709) on scikit-learn's 1797 digits of 8x8 pixels: two random
views of one image shall have similar representations, those of different images shall not. What the representations
are worth is measured by a linear classifier on them, which gets five labelled images of each digit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import CSVLogger, LearningRateMonitor, ModelCheckpoint, Task, Trainer


class Views(Dataset):
    """Two random views of each image (1, 8, 8), from the random state of the sample."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return view_of(self.images[index]), view_of(self.images[index])


def view_of(image: Tensor) -> Tensor:
    """Rotate by up to 20 degrees, scale and shear a little, shift by up to 1.2 pixels, add noise."""
    angle = (torch.rand(()) - 0.5) * math.pi / 4.5
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    turn = turn + (torch.rand(2, 2) - 0.5) * 0.4
    shift = (torch.rand(2, 1) - 0.5) * 0.6  # the image reaches from -1 to 1
    grid = F.affine_grid(torch.cat([turn, shift], dim=1)[None], [1, 1, 8, 8], align_corners=False)
    return F.grid_sample(image[None], grid, align_corners=False)[0] + 0.1 * torch.randn(1, 8, 8)


class SimCLR(Task):
    def __init__(self, width: int = 32, lr: float = 3e-3, temperature: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, padding=1, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(32 * width, 128),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(128, 64))  # for the loss only

    def forward(self, images: Tensor) -> Tensor:
        """Representations (rows, 128)."""
        return self.encoder(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def loss(self, views: list[Tensor]) -> Tensor:
        """Cross-entropy of finding each view's companion among all others of the batch, by their cosines."""
        points = F.normalize(self.head(self.encoder(torch.cat(list(views)))), dim=1)
        cosines = (points @ points.T / self.hparams["temperature"]).fill_diagonal_(-math.inf)
        rows = len(views[0])
        companions = torch.arange(2 * rows, device=points.device).roll(rows)
        return F.cross_entropy(cosines, companions)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def probe(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """The accuracy of a linear classifier on representations, with five labelled rows of each class."""
    chosen = torch.cat([(train_labels == digit).nonzero().flatten()[:5] for digit in range(10)])
    classifier = LogisticRegression(max_iter=1000).fit(train[chosen].numpy(), train_labels[chosen].numpy())
    return float(classifier.score(test.numpy(), test_labels.numpy()))


@click.command()
@click.option("--small", is_flag=True, help="Few epochs, to see that it runs.")
@click.option("--output", default="contrastive", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    train, val, test = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).split([1257, 200, 340])
    trainer = Trainer(
        max_epochs=2 if small else 40,
        seed=0,
        logger=CSVLogger(output, name="run"),
        log_every_n_steps=10,
        default_root_dir=output,
        callbacks=[ModelCheckpoint(monitor="val_loss", filename="{epoch}"), LearningRateMonitor()],
    )

    def encoded(task: SimCLR) -> Tensor:
        return torch.cat(trainer.predict(task, DataLoader(images, 256)))

    task = SimCLR()
    untrained = encoded(task)
    trainer.fit(
        task, DataLoader(Views(images[train]), 128, shuffle=True, drop_last=True), DataLoader(Views(images[val]), 100)
    )
    trained = encoded(task)
    spaces = {"pixels": images.flatten(1), "untrained": untrained, "trained": trained}
    accuracies = {f"probe_{name}": probe(x[train], labels[train], x[test], labels[test]) for name, x in spaces.items()}
    trainer.print("a linear classifier with 50 labels:", ", ".join(f"{k} {v:.1%}" for k, v in accuracies.items()))
    if trainer.is_global_zero:
        plane = PCA(2).fit_transform(trained[test].numpy()).round(3).tolist()
        results = {**accuracies, "plane": plane, "digits": labels[test].tolist()}
        (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
