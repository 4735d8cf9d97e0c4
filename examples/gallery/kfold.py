"""Cross-validation: a model for each of five folds, and every row of the data predicted by one that has not seen it.

    python examples/gallery/kfold.py

The data are scikit-learn's 178 wines of three cultivars, 13 measurements of each. A set this small has no part to spare
for a test, and one split would prove little: the accuracies of the folds show how much is chance.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import CSVLogger, EarlyStopping, ModelCheckpoint, Task, Trainer


class WineClassifier(Task):
    """A small network; the mean and deviation of each column are those of the fold's own training rows."""

    def __init__(self, mean: list[float], deviation: list[float], width: int = 32, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))
        self.network = nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.network((x - self.mean) / self.deviation)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.05)


@click.command()
@click.option("--small", is_flag=True, help="Few epochs, to see that it runs.")
@click.option("--output", default="kfold", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    data = load_wine()
    x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    rows = TensorDataset(x, y)
    chances = torch.zeros(len(y), 3)  # of each row, by the model of the fold that it was held out of
    scores = []
    for fold, (chosen, held_out) in enumerate(StratifiedKFold(5, shuffle=True, random_state=0).split(x, y)):
        best = ModelCheckpoint(monitor="val_loss", filename="{epoch}")
        trainer = Trainer(
            max_epochs=4 if small else 60,
            seed=fold,
            logger=CSVLogger(output, name="folds", version=f"fold_{fold}"),
            log_every_n_steps=9,
            default_root_dir=output,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[best, EarlyStopping("val_loss", patience=10)],
        )
        task = WineClassifier(x[chosen].mean(0).tolist(), x[chosen].std(0).tolist())
        loader = DataLoader(torch.utils.data.Subset(rows, chosen.tolist()), 16, shuffle=True)
        held_out_loader = DataLoader(torch.utils.data.Subset(rows, held_out.tolist()), 64)
        trainer.fit(task, loader, held_out_loader)
        chances[held_out] = torch.cat(trainer.predict(task, held_out_loader, ckpt_path="best"))
        scores.append(float((chances[held_out].argmax(1) == y[held_out]).float().mean()))
        trainer.print(f"fold {fold + 1}: accuracy {scores[-1]:.1%} after {trainer.current_epoch} epochs")

    mean, deviation = torch.tensor(scores).mean(), torch.tensor(scores).std()
    correct = chances.argmax(1) == y
    results = {
        "accuracy": float(correct.float().mean()),
        "mean_of_folds": float(mean),
        "deviation_of_folds": float(deviation),
        "loss": float(F.nll_loss(chances.log(), y)),
        "folds": scores,
        "mistaken_rows": (~correct).nonzero().flatten().tolist(),
    }
    trainer.print(f"accuracy {mean:.1%} ± {deviation:.1%}; mistaken rows: {results['mistaken_rows']}")
    if trainer.is_global_zero:
        (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
