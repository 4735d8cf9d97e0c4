"""Tabular data: a data module, columns scaled by the training part, and how much each column matters.

    python examples/gallery/tabular.py

The data are scikit-learn's 569 breast tumours, 30 measurements of each, benign or malignant. A logistic regression on
the same columns is the reference. The importance of a column is what accuracy loses when its values are permuted.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryRecall

from drivetrain import CSVLogger, DataModule, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Task, Trainer


class Tumours(DataModule):
    """Columns with mean 0 and deviation 1 over the training part; 1 is malignant."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        data = load_breast_cancer()
        self.columns = data.feature_names.tolist()
        malignant = 1 - data.target
        rest, test = train_test_split(range(len(malignant)), test_size=114, stratify=malignant, random_state=0)
        train, val = train_test_split(rest, test_size=91, stratify=malignant[rest], random_state=0)
        table = (data.data - data.data[train].mean(0)) / data.data[train].std(0)
        x, y = torch.tensor(table, dtype=torch.float32), torch.tensor(malignant, dtype=torch.float32)
        self.train, self.val, self.test = (TensorDataset(x[part], y[part]) for part in (train, val, test))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 128)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 128)


def residual(width: int, dropout: float) -> nn.Module:
    layers = (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width))
    return nn.Sequential(*layers)


class TumourClassifier(Task):
    """A residual network of two blocks; inputs are dropped at random too, since many columns are alike."""

    def __init__(self, width: int = 64, dropout: float = 0.2, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inputs = nn.Sequential(nn.Dropout(0.1), nn.Linear(30, width))
        self.blocks = nn.ModuleList(residual(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, 1)
        measures = {"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC(), "recall": BinaryRecall()}
        self.measures = nn.ModuleDict(
            {part: MetricCollection(measures, prefix=f"{part}_").clone() for part in ("val", "test")}
        )

    def forward(self, x: Tensor) -> Tensor:
        """The logits (rows,) of being malignant."""
        x = self.inputs(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        logits = self(batch[0])
        self.measures[part].update(logits, batch[1].int())
        self.log(f"{part}_loss", F.binary_cross_entropy_with_logits(logits, batch[1]), prog_bar=True)
        self.log_dict(self.measures[part])

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


@torch.no_grad()
def importances(task: TumourClassifier, data: Tumours) -> dict[str, float]:
    """What accuracy on the test part loses when a column is permuted, over 20 permutations, largest first."""
    x, y = data.test.tensors
    generator = torch.Generator().manual_seed(0)
    task.eval()

    def accuracy(table: Tensor) -> float:
        return float(((task(table) > 0) == y.bool()).float().mean())

    lost = {}
    for column, name in enumerate(data.columns):
        permuted = x.repeat(20, 1, 1)
        for each in permuted:
            each[:, column] = x[torch.randperm(len(x), generator=generator), column]
        lost[name] = accuracy(x) - sum(map(accuracy, permuted)) / 20
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


@click.command()
@click.option("--small", is_flag=True, help="Few epochs, to see that it runs.")
@click.option("--output", default="tabular", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    best = ModelCheckpoint(monitor="val_loss", filename="{epoch}")
    trainer = Trainer(
        max_epochs=5 if small else 100,
        seed=0,
        logger=CSVLogger(output, name="run"),
        log_every_n_steps=12,
        default_root_dir=output,
        callbacks=[best, EarlyStopping("val_loss", patience=15), LearningRateMonitor()],
    )
    data = Tumours()
    trainer.fit(TumourClassifier(), datamodule=data)
    [results] = trainer.test(datamodule=data, ckpt_path="best")
    logistic = LogisticRegression(max_iter=1000).fit(*(part.numpy() for part in data.train.tensors))
    results["logistic_regression"] = float(logistic.score(*(part.numpy() for part in data.test.tensors)))
    if trainer.is_global_zero:
        task = TumourClassifier.load_from_checkpoint(best.best_model_path)
        results["importances"] = dict(list(importances(task, data).items())[:8])
        (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
