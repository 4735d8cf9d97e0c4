"""Thirteen tasks written for Lightning: `lightning_tasks.py RESULT [TASK ...]` writes what each has computed.

Nothing here is of drivetrain: the same file runs under Lightning and, with ours in its place, under drivetrain.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.demos import Transformer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

DEVICE = os.environ.get("DRIVETRAIN_TESTS_DEVICE", "cpu")
# The kind of device that one of the two sides runs on. Its generator draws other numbers than that of the CPU.
COMPARED = os.environ.get("COMPAT_DEVICE", "cpu")
DROPOUT = 0.1 if COMPARED == "cpu" else 0.0

Report = dict[str, float]
TASKS: dict[str, Callable[[str], Report]] = {}


def task(run: Callable[[str], Report]) -> Callable[[str], Report]:
    """Count a function among the tasks; it is given a folder and returns numbers by name."""
    TASKS[run.__name__] = run
    return run


def trainer(root: str, **options) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_epochs": 2}
    checkpoints = {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in options.get("callbacks", []))}
    return L.Trainer(
        default_root_dir=root,
        accelerator=DEVICE,
        devices=1,
        **{**quiet, **checkpoints, **options},
    )


def table(rows: int = 64, columns: int = 8, classes: int = 3) -> TensorDataset:
    made = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=made)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long() * (classes > 2))


class Keeps(L.LightningModule):
    """Keeps the loss of every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def keep(self, loss):
        self.losses.append(float(loss))
        return loss

    def report(self) -> Report:
        values = {f"loss {number}": value for number, value in enumerate(self.losses)}
        return {**values, **{name: float(value) for name, value in self.trainer.callback_metrics.items()}}


class Classifier(Keeps):
    def __init__(self, lr: float = 0.1, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return self.keep(loss)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_accuracy": self.accuracy})

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


@task
def classification(root: str) -> Report:
    """Classification with metrics, shuffled data, a test of the best checkpoint, a CSV log"""
    model, best = Classifier(), ModelCheckpoint(monitor="val_loss", mode="min")
    run = trainer(root, max_epochs=3, callbacks=[best], logger=CSVLogger(root), log_every_n_steps=2)
    run.fit(model, DataLoader(table(), 10, shuffle=True), DataLoader(table(30), 7))
    report = model.report()
    tested = run.test(dataloaders=DataLoader(table(20), 6), ckpt_path="best", verbose=False)[0]
    return {**report, **tested, "best": float(best.best_model_score), "epoch": run.current_epoch}


@task
def regression(root: str) -> Report:
    """Regression that stops early, with a schedule that monitors the validation"""

    class Regressor(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            return {"loss": self.keep(F.mse_loss(self.line(batch[0])[:, 0], batch[1].float()))}

        def validation_step(self, batch, batch_idx):
            self.log("val_mse", F.mse_loss(self.line(batch[0])[:, 0], batch[1].float()), prog_bar=True)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.3)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_mse"}}

    model = Regressor()
    run = trainer(root, max_epochs=9, callbacks=[EarlyStopping("val_mse", patience=2, min_delta=0.01)])
    run.fit(model, DataLoader(table(), 16), DataLoader(table(32), 16))
    return {**model.report(), "steps": run.global_step, "lr": run.optimizers[0].param_groups[0]["lr"]}


@task
def gan(root: str) -> Report:
    """A GAN with manual optimization and two optimizers in turn"""

    class Gan(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
            self.discriminator = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch, batch_idx):
            real = batch[0]
            first, second = self.optimizers()
            ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
            self.toggle_optimizer(first)
            made = self.discriminator(self.generator(torch.randn(len(real), 4).to(self.device)))
            loss = F.binary_cross_entropy_with_logits(made, ones)
            self.manual_backward(self.keep(loss))
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            first.zero_grad()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            fake = self.discriminator(self.generator(torch.randn(len(real), 4).to(self.device)).detach())
            loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
            loss = loss + F.binary_cross_entropy_with_logits(fake, zeros)
            self.manual_backward(self.keep(loss))
            second.step()
            second.zero_grad()
            self.untoggle_optimizer(second)
            self.log("d_loss", loss, prog_bar=True)

        def on_train_epoch_end(self):
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self):
            both = [torch.optim.Adam(each.parameters(), 0.01) for each in (self.generator, self.discriminator)]
            return both, [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in both]

    model = Gan()
    trainer(root).fit(model, DataLoader(table(), 16, shuffle=True))
    return model.report()


@task
def autoencoder(root: str) -> Report:
    """An autoencoder, validated several times in an epoch, for a number of steps"""

    class Auto(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 3), nn.Linear(3, 8)

        def training_step(self, batch, batch_idx):
            x, _ = batch
            return self.keep(F.mse_loss(self.decoder(self.encoder(x)), x))

        def validation_step(self, batch, batch_idx):
            x, _ = batch
            self.log("val", F.mse_loss(self.decoder(self.encoder(x)), x))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    model = Auto()
    run = trainer(root, val_check_interval=0.5, limit_val_batches=2, max_steps=7, max_epochs=-1)
    run.fit(model, DataLoader(table(), 16), DataLoader(table(32), 8))
    return {**model.report(), "steps": run.global_step}


class Tokens(Dataset):
    vocab_size = 24

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab_size, (13,), generator=made)
        return tokens[:-1], tokens[1:]


@task
def language_model(root: str) -> Report:
    """The Transformer of `lightning.pytorch.demos`, with clipping and a schedule by step"""

    class Language(Keeps):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"vocab_size": Tokens.vocab_size, "ninp": 16, "nhead": 2, "nhid": 16, "nlayers": 1}
            self.model = Transformer(**sizes, dropout=2 * DROPOUT)

        def training_step(self, batch, batch_idx):
            inputs, target = batch
            return self.keep(F.nll_loss(self.model(inputs, target), target.view(-1)))

        def configure_optimizers(self):
            # With a smaller eps, what differs by rounding alone moves a weight by all of lr.
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    model = Language()
    trainer(root, gradient_clip_val=0.1).fit(model, DataLoader(Tokens(), 4))
    return model.report()


@task
def two_optimizers(root: str) -> Report:
    """Two optimizers over one network, stepped in turn by hand, one of them every second batch"""

    class Turns(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.second(self.first(batch[0]).relu()), batch[1])
            one, two = self.optimizers()
            self.manual_backward(self.keep(loss) / 2)
            one.step()
            one.zero_grad()
            if batch_idx % 2:
                two.step()
                two.zero_grad()
            self.log("loss", loss, on_epoch=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.Adam(self.second.parameters(), 0.01)

    model = Turns()
    trainer(root).fit(model, DataLoader(table(), 16))
    return model.report()


@task
def schedules(root: str) -> Report:
    """A schedule of each interval, with frequencies, seen by LearningRateMonitor"""
    report: Report = {}
    for interval, frequency in (("epoch", 1), ("epoch", 2), ("step", 1), ("step", 3)):

        class Scheduled(Classifier):
            def configure_optimizers(self, interval=interval, frequency=frequency):
                optimizer = super().configure_optimizers()
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": schedule, "interval": interval, "frequency": frequency},
                }

        L.seed_everything(3, verbose=False)
        model, monitor = Scheduled(), LearningRateMonitor()
        run = trainer(root, max_epochs=3, callbacks=[monitor], logger=CSVLogger(root), log_every_n_steps=1)
        run.fit(model, DataLoader(table(96), 16))
        here = {**model.report(), **{f"lr {n}": each for n, each in enumerate(monitor.lrs["lr-SGD"])}}
        report.update({f"{interval}/{frequency} {name}": value for name, value in here.items()})
    return report


@task
def accumulation(root: str) -> Report:
    """Accumulation over 3 batches, the last window shorter, with clipping by value"""
    model = Classifier(dropout=0.0)
    run = trainer(root, accumulate_grad_batches=3, gradient_clip_val=0.05, gradient_clip_algorithm="value")
    run.fit(model, DataLoader(table(72), 8), DataLoader(table(16), 8))
    return {**model.report(), "steps": run.global_step}


@task
def several_loaders(root: str) -> Report:
    """Two validation loaders, and a dict of training loaders"""

    class Several(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["one"], batch_idx) + 0.5 * F.cross_entropy(
                self(batch["two"][0]), batch["two"][1]
            )

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("val", loss)
            self.log("both", loss, add_dataloader_idx=False) if dataloader_idx == 1 else None

    model = Several()
    loaders = {"one": DataLoader(table(), 16), "two": DataLoader(table(48), 12)}
    run = trainer(root)
    run.fit(model, loaders, [DataLoader(table(20), 10), DataLoader(table(21), 7)])
    report = model.report()
    for number, results in enumerate(
        run.validate(model, [DataLoader(table(20), 10), DataLoader(table(21), 7)], verbose=False)
    ):
        report.update({f"{number} {name}": value for name, value in results.items()})
    return report


class Rows(L.LightningDataModule):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.sets = {"fit": table(), "validate": table(24), "test": table(20), "predict": table(10)}

    def train_dataloader(self):
        return DataLoader(self.sets["fit"], batch_size=self.hparams.size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.sets["validate"], batch_size=self.hparams.size)

    def test_dataloader(self):
        return DataLoader(self.sets["test"], batch_size=self.hparams.size)

    def predict_dataloader(self):
        return DataLoader(self.sets["predict"], batch_size=self.hparams.size)


@task
def data_module(root: str) -> Report:
    """A LightningDataModule through fit, validate, test and predict"""
    model, rows, run = Classifier(), Rows(12), trainer(root)
    run.fit(model, datamodule=rows)
    report = model.report()
    report.update(run.validate(model, datamodule=rows, verbose=False)[0])
    report.update(run.test(model, datamodule=rows, verbose=False)[0])
    predicted = torch.cat(run.predict(model, datamodule=rows))
    return {**report, **{f"predicted {number}": int(each) for number, each in enumerate(predicted)}}


@task
def transfer(root: str) -> Report:
    """Transfer learning: BackboneFinetuning over a schedule"""

    class Transfer(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
            self.head = nn.Linear(8, 3)

        def training_step(self, batch, batch_idx):
            return self.keep(F.cross_entropy(self.head(self.backbone(batch[0])), batch[1]))

        def configure_optimizers(self):
            optimizer = torch.optim.Adam([each for each in self.parameters() if each.requires_grad], 0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    model = Transfer()
    run = trainer(root, max_epochs=4, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=2)])
    run.fit(model, DataLoader(table(), 16))
    rates = [group["lr"] for group in run.optimizers[0].param_groups]
    return {**model.report(), **{f"lr {number}": rate for number, rate in enumerate(rates)}}


@task
def averages(root: str) -> Report:
    """Averaged weights: an EMA, and stochastic weight averaging with its own rates"""
    report: Report = {}
    for name, callback in (
        ("ema", EMAWeightAveraging(decay=0.9)),
        ("swa", StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2)),
    ):
        L.seed_everything(5, verbose=False)
        model = Classifier()
        run = trainer(root, max_epochs=4, callbacks=[callback])
        run.fit(model, DataLoader(table(), 16), DataLoader(table(24), 8))
        weights = {f"weight {n}": float(p.detach().double().sum()) for n, p in model.named_parameters()}
        report.update({f"{name} {key}": value for key, value in {**model.report(), **weights}.items()})
    return report


@task
def writer_and_resume(root: str) -> Report:
    """A run that is resumed from its checkpoint, and predictions through a writer"""
    report: Report = {}

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
            report.update({f"row {row}": int(each) for row, each in zip(indices, prediction, strict=True)})

        def write_on_epoch_end(self, trainer, module, predictions, indices):
            report["predictions"] = sum(len(each) for each in predictions)

    whole = Classifier(dropout=0.0)
    saves = ModelCheckpoint(Path(root, "saved"), "{epoch}", save_top_k=-1)
    trainer(root, max_epochs=4, callbacks=[saves]).fit(whole, DataLoader(table(), 16), DataLoader(table(24), 8))
    resumed = Classifier(dropout=0.0)
    run = trainer(root, max_epochs=4, callbacks=[Writer("batch_and_epoch")])
    first = str(Path(root, "saved", "epoch=1.ckpt"))
    run.fit(resumed, DataLoader(table(), 16), DataLoader(table(24), 8), ckpt_path=first)
    assert resumed.losses == whole.losses[8:], (resumed.losses, whole.losses)
    report.update(resumed.report())
    run.predict(resumed, DataLoader(table(20), 6))
    loaded = Classifier.load_from_checkpoint(first)
    return {**report, "lr": loaded.hparams.lr, "weights": float(sum(p.double().sum() for p in loaded.parameters()))}


def main() -> None:
    result, *names = sys.argv[1:]
    warnings.filterwarnings("ignore")
    reports = {}
    for name in names or TASKS:
        L.seed_everything(7, verbose=False)
        with tempfile.TemporaryDirectory() as root:
            try:
                reports[name] = TASKS[name](root)
            except Exception as error:
                if names:
                    raise
                reports[name] = f"{type(error).__name__}: {error}"
    Path(result).write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
