"""Tasks for the Trainer, sound or with one planted mistake: `python trainer_task.py CASE`."""

from __future__ import annotations

import os
import random
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from drivetrain import Task, Trainer, set_seed
from drivetrain.callbacks import EMAWeightAveraging

CASE = sys.argv[1]
CLASSES, SIZE, LENGTH, VOCABULARY = 10, 8, 12, 16


def digits() -> TensorDataset:
    # The file of sklearn.datasets.load_digits, without the seconds that an import of sklearn takes in each process.
    file = Path(str(find_spec("sklearn").origin)).with_name("datasets") / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", max_rows=256, dtype=np.float32))
    return TensorDataset(table[:, :-1].reshape(-1, 1, SIZE, SIZE) / 16, table[:, -1].long())


class Augmented(Dataset):
    def __init__(self) -> None:
        self.base = digits()

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int):
        x, y = self.base[index]
        return (x.flip(2) if random.random() < 0.5 else x) + 0.1 * torch.randn(x.shape), y


def sentences() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCABULARY, (192, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (192, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(LENGTH) < lengths, tokens, 0))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 2, 2)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(16) if CASE == "batch_norm" else nn.GroupNorm(4, 16)
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3), norm, nn.ReLU(), nn.Dropout2d(0.1), nn.Flatten(), nn.LazyLinear(CLASSES)
        )
        self.body(torch.zeros(2, 1, SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Classify(Task):
    def __init__(self) -> None:
        super().__init__()
        self.model = VisionTransformer() if CASE == "vision_transformer" else Convolutions()
        if CASE in ("plain", "epochs"):  # the others do not evaluate, and the import takes seconds
            from torchmetrics.classification import MulticlassAccuracy

            self.accuracy = MulticlassAccuracy(CLASSES)
        self.extra = nn.Parameter(torch.ones(CLASSES))
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x) * self.extra
        loss = F.cross_entropy(logits, y)
        if CASE == "center":
            with torch.no_grad():
                self.center.lerp_(logits.mean(0), 0.1)
            loss = loss + 0.1 * (logits - self.center).square().mean()
        if CASE == "skipped_on_a_rank" and self.global_rank == 1:
            loss = loss * 0
        if CASE == "seed_of_the_clock":
            loss = loss * (1 + (time.time_ns() % 100) / 100)
        if CASE == "gathered_without_gradient":
            rows = F.normalize(self.all_gather(logits).reshape(-1, CLASSES), dim=1)
            labels = self.all_gather(y).reshape(-1)
            same = (labels[:, None] == labels).float()
            return loss + ((rows @ rows.T - same) ** 2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        right = (self(x).argmax(1) == y).float()
        if CASE == "metric_of_a_rank":
            self.log("right", right.mean(), sync_dist=False)
        elif CASE in ("plain", "epochs"):
            self.accuracy(self(x), y)
            self.log("accuracy", self.accuracy, on_epoch=True)
            self.log("right", right.mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=64)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self):
        data = Augmented() if CASE in ("augmented", "workers") else digits()
        if CASE == "epochs":
            data = Subset(data, range(32))
        if CASE == "own_sampler":
            sampler = RandomSampler(data, generator=torch.Generator().manual_seed(self.global_rank))
            return DataLoader(data, 8, sampler=sampler)
        return DataLoader(data, 8, shuffle=True, num_workers=2 if CASE == "workers" else 0)

    def val_dataloader(self):
        return DataLoader(Subset(digits(), range(50)), 40)


class Language(Task):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)
        if CASE == "tied":
            self.head.weight = self.embedding.weight

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        logits = self.head(self.layers(self.embedding(tokens[:, :-1]))[0])
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0, reduction="sum")
        count = (tokens[:, 1:] != 0).sum()
        return losses / count if CASE in ("token_mean", "token_mean_accumulated") else {"loss": losses, "weight": count}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)

    def train_dataloader(self):
        return DataLoader(sentences(), 8, shuffle=True)


class Adversarial(Task):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, SIZE * SIZE))
        self.discriminator = nn.Sequential(nn.Linear(SIZE * SIZE, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        real = batch[0].flatten(1)
        first, second = self.optimizers()
        noise = torch.randn(len(real), 4)
        for optimizer, module in ((first, self.discriminator), (second, self.generator)):
            self.toggle_optimizer(optimizer)
            fake = self.generator(noise)
            if module is self.discriminator:
                loss = (
                    F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
                )
            else:
                loss = F.softplus(-self.discriminator(fake)).mean()
            if CASE == "gan_plain_backward":
                loss.backward()
            else:
                self.manual_backward(loss)
            if CASE == "gan_clipped_by_hand":
                nn.utils.clip_grad_norm_(module.parameters(), 0.1 * (1 + self.global_rank))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.discriminator, self.generator)]

    def train_dataloader(self):
        return DataLoader(digits(), 8, shuffle=True)


def main() -> None:
    set_seed(int(os.environ.get("VERIFY_SEED", "1")))
    options = {}
    if CASE in ("accumulated", "token_mean_accumulated", "language_accumulated"):
        options["accumulate_grad_batches"] = 2
    if CASE == "clipped":
        options["gradient_clip_val"] = 0.5
    if CASE == "averaged":
        options["callbacks"] = [EMAWeightAveraging(decay=0.9)]
    if CASE.startswith("gan"):
        task: Task = Adversarial()
    elif CASE.startswith(("token_mean", "language", "tied")):
        task = Language()
    else:
        task = Classify()
    trainer = Trainer(
        max_epochs=2,
        limit_train_batches=4 if CASE.startswith("metric") or CASE == "plain" else None,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(task)


if __name__ == "__main__":
    main()
