"""Forecasting with quantiles: the potential of a nerve cell's membrane, a few milliseconds ahead.

    python examples/gallery/forecasting.py

The series is `membrane.dat`, which comes with matplotlib, one sample every half millisecond: the 9,900 during which the
cell was stimulated. From 128 samples the network forecasts the next 32: for each their 10 %, 50 % and 90 % quantiles,
by the pinball loss. The references are the last value, and a linear regression.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import torch
from matplotlib.cbook import get_sample_data
from sklearn.linear_model import Ridge
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanAbsoluteError, MeanMetric

from drivetrain import CSVLogger, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Task, Trainer

PAST, AHEAD = 128, 32
QUANTILES = (0.1, 0.5, 0.9)


class Windows(Dataset):
    """Stretches of a series: 128 samples, and the 32 after them."""

    def __init__(self, series: Tensor, stride: int = 1) -> None:
        self.series, self.stride = series, stride

    def __len__(self) -> int:
        return (len(self.series) - PAST - AHEAD) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.series[index * self.stride : index * self.stride + PAST + AHEAD]
        return window[:PAST], window[PAST:]


def load_parts() -> tuple[Windows, Windows, Windows]:
    """The first 70 % to train on, then 15 % to validate and 15 % to test; in deviations of the training part."""
    with get_sample_data("membrane.dat") as file:
        series = torch.from_numpy(np.frombuffer(file.read(), np.float32).copy())[1000:10_900]
    series = (series - series[:6930].mean()) / series[:6930].std()
    train, val, test = series.split([6930, 1485, 1485])
    return Windows(train, stride=2), Windows(val, stride=4), Windows(test, stride=4)


class Forecaster(Task):
    """Dilated convolutions over the past, and a linear layer to all quantiles; it forecasts what changes."""

    def __init__(self, width: int = 24, dropout: float = 0.3, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers: list[nn.Module] = []
        for level in range(5):
            layers += [nn.Conv1d(width if level else 1, width, 3, dilation=2**level, padding=2**level), nn.GELU()]
        self.past = nn.Sequential(*layers)
        self.ahead = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * width, AHEAD * len(QUANTILES)))
        self.error = nn.ModuleDict({part: MeanAbsoluteError() for part in ("val", "test")})
        self.covered = nn.ModuleDict({part: MeanMetric() for part in ("val", "test")})

    def forward(self, past: Tensor) -> Tensor:
        """Quantiles (rows, 32, 3) of what comes after (rows, 128)."""
        last, scale = past[:, -1:], past.std(1, keepdim=True) + 0.05  # of each window: the series drifts
        seen = self.past(((past - last) / scale)[:, None])
        changes = self.ahead(torch.cat([seen[..., -1], seen.mean(-1)], dim=1)).view(-1, AHEAD, len(QUANTILES))
        return last[..., None] + scale[..., None] * changes

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def loss(self, quantiles: Tensor, ahead: Tensor) -> Tensor:
        """The pinball loss: an error above a quantile q weighs q, one below it 1 - q."""
        error, q = ahead[..., None] - quantiles, quantiles.new_tensor(QUANTILES)
        return torch.maximum(q * error, (q - 1) * error).mean()

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        quantiles = self(batch[0])
        low, median, high = quantiles.unbind(-1)
        self.error[part].update(median.contiguous(), batch[1])
        self.covered[part].update(((low <= batch[1]) & (batch[1] <= high)).float())
        self.log(f"{part}_loss", self.loss(quantiles, batch[1]), prog_bar=True)
        self.log(f"{part}_error", self.error[part])
        self.log(f"{part}_covered", self.covered[part])

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def references(train: Windows, test: Windows) -> dict[str, float]:
    """The mean absolute errors of the last value and of a linear regression."""
    (past, ahead), (test_past, test_ahead) = (
        (w - w[:, PAST - 1 : PAST]).split([PAST, AHEAD], dim=1)
        for w in (torch.stack([torch.cat(part[i]) for i in range(len(part))]) for part in (train, test))
    )
    linear = torch.tensor(Ridge().fit(past.numpy(), ahead.numpy()).predict(test_past.numpy()))
    guesses = {"last_value": torch.zeros(1), "linear_regression": linear}  # all as changes from the last value
    return {f"error_of_{name}": float((test_ahead - guess).abs().mean()) for name, guess in guesses.items()}


@click.command()
@click.option("--small", is_flag=True, help="Few epochs, to see that it runs.")
@click.option("--output", default="forecasting", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    train, val, test = load_parts()
    best = ModelCheckpoint(monitor="val_loss", filename="{epoch}")
    trainer = Trainer(
        max_epochs=2 if small else 6,
        limit_train_batches=20 if small else None,
        seed=0,
        logger=CSVLogger(output, name="run"),
        log_every_n_steps=10,
        default_root_dir=output,
        callbacks=[best, EarlyStopping("val_loss", patience=6), LearningRateMonitor()],
    )
    task = Forecaster()
    trainer.fit(task, DataLoader(train, 64, shuffle=True), DataLoader(val, 256))
    [results] = trainer.test(task, DataLoader(test, 256), ckpt_path="best")
    quantiles = torch.cat(trainer.predict(task, DataLoader(test, 256), ckpt_path="best"))
    results |= references(train, test)
    if trainer.is_global_zero:
        shown = [0, len(test) // 2, len(test) - 1]
        results["windows"] = [
            {"past": test[i][0].tolist(), "ahead": test[i][1].tolist(), "quantiles": quantiles[i].tolist()}
            for i in shown
        ]
        (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
