"""A small seeded training that shoots itself: what the crash harness runs on two processes.

Everything that must survive is in it: shuffling, augmentation, dropout, batch norm, accumulation, a scheduler by
steps, torchmetrics, an average of the weights kept by a callback, validation, a table of values, checkpoints every
few steps. Each batch leaves a line that says which samples were seen and what came out, bit for bit; so do the batches
that a crash throws away and the resumed run repeats.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from tests.crash.light_imports import not_installed

with not_installed("matplotlib", "scipy"):  # which torchmetrics would import, in each rank of each attempt
    from torchmetrics.aggregation import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

from drivetrain import Callback, CSVLogger, ModelCheckpoint, Task, Trainer, set_seed
from tests.crash.shots import Shot

FEATURES, CLASSES = 8, 4


class Augmented(Dataset[tuple[int, Tensor, int]]):
    """Samples that differ each time they are read, by all three generators that people use."""

    def __init__(self, size: int, augment: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(size, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        features = self.features[index]
        if self.augment:
            noise = torch.randn(FEATURES) * random.random() + float(np.random.rand())
            features = features + 0.1 * noise
        return index, features, int(self.labels[index])


class Classifier(Task):
    def __init__(self, trace: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
        )
        self.accuracy = MulticlassAccuracy(num_classes=CLASSES)
        self.validation_loss = MeanMetric()
        self.trace = trace

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        indices, features, labels = batch
        logits = self.net(features)
        loss = cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        trainer = self.trainer
        line = {
            "batch": [trainer.current_epoch, batch_idx],
            "step": trainer.global_step,
            "samples": indices.tolist(),
            "loss": loss.item().hex(),
            "augmented": digest([features]),
        }
        with self.trace.with_name(f"{self.trace.name}{trainer.global_rank}").open("ab", buffering=0) as file:
            file.write(f"{json.dumps(line)}\n".encode())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, features, labels = batch
        self.validation_loss(cross_entropy(self.net(features), labels))
        self.log("val_loss", self.validation_loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class WeightAverage(Callback):
    """An average of the weights over the steps, as a user would write it."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.step = 0

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        for name, value in task.named_parameters():
            kept = self.average.setdefault(name, value.detach().clone())
            kept.lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "average": dict(self.average)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.average = state_dict["step"], dict(state_dict["average"])


def digest(tensors: Iterable[Tensor]) -> str:
    """One text for the bits of tensors."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return content.hexdigest()[:16]


def end_of(trainer: Trainer, task: Task, average: WeightAverage) -> dict[str, Any]:
    """What a finished run is compared by."""
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    return {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "parameters": digest(task.parameters()),
        "buffers": digest(task.buffers()),
        "optimizer": digest(states),
        "average": digest(average.average.values()),
        "rate": trainer.optimizers[0].param_groups[0]["lr"].hex(),
        "metrics": {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())},
        "python": random.random().hex(),
        "torch": torch.rand(()).item().hex(),
        "numpy": float(np.random.rand()).hex(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async_save", action="store_true")
    parser.add_argument("--num_workers", type=int, default=0)
    arguments = parser.parse_args()
    home = arguments.home

    set_seed(17)
    shot = Shot.of_this_attempt(home, arguments.kills, arguments.seed)
    average = WeightAverage()
    workers: dict[str, Any] = {"num_workers": arguments.num_workers}
    # 50 samples do not divide by the processes' batches: the last window of each epoch is short, the last batch too.
    training = DataLoader(Augmented(50, augment=True), batch_size=4, shuffle=True, **workers)
    validating = DataLoader(Augmented(10, augment=False), batch_size=4)
    checkpoints = ModelCheckpoint(
        dirpath=home / "checkpoints",
        every_n_train_steps=3,
        save_top_k=-1,
        total_limit=2,
        async_save=arguments.async_save,
    )
    trainer = Trainer(
        max_epochs=arguments.epochs,
        accumulate_grad_batches=2,
        callbacks=[average, checkpoints, *([shot] if shot is not None else [])],
        logger=CSVLogger(home / "logs", flush_logs_every_n_steps=5),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=home,
    )
    task = Classifier(home / "trace")
    trainer.fit(task, training, validating, resume="auto")
    end = end_of(trainer, task, average)
    (home / f"end{trainer.global_rank}.json").write_text(json.dumps(end, indent=1))


if __name__ == "__main__":
    main()
