"""Distillation: a network of 1,500 parameters learns from one of 31,000 what labels alone do not teach it.

    python examples/gallery/distillation.py

Hinton, Vinyals and Dean 2015 (https://arxiv.org/abs/1503.02531) on scikit-learn's 1797 digits of 8x8 pixels, 100 of
the training images with labels. The teacher sees these, shifted at random; the student is trained on them alone, and
then on what the teacher makes of all training images, labelled or not.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import CSVLogger, LearningRateMonitor, ModelCheckpoint, Task, Trainer, set_seed


class Digits(Dataset):
    """Images 1x8x8 in [0, 1] and their labels; with `shift`, moved by up to one pixel each way."""

    def __init__(self, images: Tensor, labels: Tensor, shift: bool) -> None:
        self.images, self.labels, self.shift = images, labels, shift

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.shift:
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, [1] * 4)[:, down : down + 8, right : right + 8]
        return image, self.labels[index]


def make_teacher() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10))


def make_student() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))


class Classifier(Task):
    """Trained on labels or, with a teacher, on the teacher's softened outputs."""

    def __init__(self, network: nn.Module, teacher: nn.Module | None = None, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.network = network
        # In a tuple, it is no module of this task: not trained, not saved, not moved.
        self.teacher = (teacher.eval().requires_grad_(False),) if teacher else ()
        self.accuracy = nn.ModuleDict({part: MulticlassAccuracy(10, average="micro") for part in ("val", "test")})

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = self.distillation_loss(images) if self.teacher else F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def distillation_loss(self, images: Tensor, temperature: float = 3.0) -> Tensor:
        """How far the student's softened outputs are from the teacher's; no label is used."""
        wanted = self.teacher[0](images) / temperature
        given = F.log_softmax(self(images) / temperature, dim=1)
        return F.kl_div(given, wanted.log_softmax(1), reduction="batchmean", log_target=True) * temperature**2

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        logits = self(batch[0])
        self.accuracy[part].update(logits, batch[1])
        self.log(f"{part}_loss", F.cross_entropy(logits, batch[1]))
        self.log(f"{part}_accuracy", self.accuracy[part], prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@click.command()
@click.option("--small", is_flag=True, help="Few steps, to see that it runs.")
@click.option("--output", default="distillation", type=click.Path(path_type=Path), help="Where to write.")
def main(small: bool, output: Path) -> None:
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    train, val, test = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).split([1257, 270, 270])
    labelled = train[:100]
    results = {}

    def run(name: str, task: Classifier, rows: Tensor, batch_size: int) -> None:
        trainer = Trainer(
            max_steps=40 if small else 1000,
            val_check_interval=20 if small else 50,
            check_val_every_n_epoch=None,
            seed=0,
            logger=CSVLogger(output, name=name),
            log_every_n_steps=10,
            default_root_dir=output,
            enable_progress_bar=False,
            callbacks=[ModelCheckpoint(monitor="val_accuracy", mode="max", filename="{step}"), LearningRateMonitor()],
        )
        loader = DataLoader(Digits(images[rows], labels[rows], shift=True), batch_size, shuffle=True)
        val_loader, test_loader = (DataLoader(Digits(images[r], labels[r], shift=False), 270) for r in (val, test))
        trainer.fit(task, loader, val_loader)
        [tested] = trainer.test(task, test_loader, ckpt_path="best", verbose=False)
        results[name] = tested["test_accuracy"]
        count = sum(value.numel() for value in task.network.parameters())
        trainer.print(f"{name}: test accuracy {results[name]:.1%} with {count:,} parameters")

    set_seed(0)
    teacher = Classifier(make_teacher())
    run("teacher", teacher, labelled, batch_size=50)
    first = make_student().state_dict()  # both students begin alike
    for name, source, rows in (("student_alone", None, labelled), ("student", teacher.network, train)):
        student = make_student()
        student.load_state_dict(first)
        run(name, Classifier(student, source), rows, batch_size=50)
    (output / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
