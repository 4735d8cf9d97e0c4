"""A run that can be broken off anywhere, and everything that a resumed one must have in common with a whole one."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import Callback, CombinedLoader, CSVLogger, PermutationSampler, Task, Trainer, set_seed
from tests.pool import device

SAMPLES, CLASSES = 48, 3


class Augmented(Dataset):
    """Samples with noise from all three generators, of which each knows its index."""

    def __init__(self, samples: int = SAMPLES, offset: int = 0) -> None:
        self.samples, self.offset = samples, offset

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.linspace(0, 1, 6) * (index + 1) / self.samples
        noise = 0.1 * torch.randn(6) + 0.01 * random.random()
        return torch.cat([base + noise, torch.tensor([float(index + self.offset)])]), torch.tensor(index % CLASSES)


class Stream(IterableDataset):
    """An iterable set without a state of its own."""

    def __iter__(self) -> Any:
        plain = Augmented()
        return (plain[index] for index in range(SAMPLES))


class Traced(Task):
    """Dropout, a metric, values by step and epoch; keeps each batch's sample numbers and loss."""

    def __init__(self, trace: list[tuple[int, list[int], float]]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.25), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, CLASSES)
        )
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.trace = trace
        self.validated = 0

    def on_validation_epoch_end(self) -> None:
        self.validated += not self.trainer.sanity_checking

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        x = torch.cat([part[0] for part in parts])
        y = torch.cat([part[1] for part in parts])
        logits = self.net(x[:, :6])
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if self.trainer.batch_info.real_rows != 0:
            self.trace.append((self.global_step, x[:, 6].int().tolist(), loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x[:, :6]), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=500)
        by_value = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": by_value, "monitor": "val_loss"},
        ]


class Average(Callback):
    """An exponential moving average of the weights, as a user writes one."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        for name, value in task.named_parameters():
            old = self.weights.get(name, value.detach()).to(value.device)  # from a checkpoint it comes on the CPU
            self.weights[name] = 0.9 * old + 0.1 * value.detach()

    def state_dict(self):
        return {"weights": dict(self.weights)}

    def load_state_dict(self, state_dict):
        self.weights = dict(state_dict["weights"])


class Broken(Exception):
    """The run was broken off."""


class BreakOff(Callback):
    """Saves at one moment of the run and ends it there."""

    runs_last_at_epoch_end = True  # as those that save

    def __init__(self, moment: str, step: int, path: str) -> None:
        self.moment, self.step, self.path = moment, step, path

    def _end(self, trainer: Trainer, moment: str) -> None:
        if moment == self.moment and trainer.global_step >= self.step and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            raise Broken

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self._end(trainer, "batch")

    def on_validation_end(self, trainer, task):
        self._end(trainer, "validation")

    def on_train_epoch_end(self, trainer, task):
        self._end(trainer, "epoch")


@dataclass
class Outcome:
    """All that a run leaves."""

    trace: list[tuple[int, list[int], float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    draws: tuple[float, float] = (0.0, 0.0)
    validated: int = 0


class Watched(DataLoader):
    """A loader with an iteration of its own."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Around:
    """An object around a loader."""

    def __init__(self, loader: DataLoader) -> None:
        self.wrapped = loader

    def __iter__(self) -> Any:
        return iter(self.wrapped)

    def __len__(self) -> int:
        return len(self.wrapped)


class Stateful(Around):
    """Keeps by itself where it is, and its epoch, which gives the order; what it has given cannot be read again."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        self.place = self.epoch = 0

    def __iter__(self) -> Any:
        size = self.wrapped.batch_size
        while self.place < SAMPLES:
            self.place += size
            numbers = range(self.place - size, self.place)
            yield self.wrapped.collate_fn([self.wrapped.dataset[n ^ self.epoch] for n in numbers])
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.epoch = state["place"], state["epoch"]


OWN_ITERATION = {"around": Around, "stateful": Stateful}


def make_loader(kind: str, rows: int) -> Any:
    """The training data of one kind."""
    name, _, workers = kind.partition("-workers")
    options: dict[str, Any] = {"batch_size": rows, "num_workers": int(workers or 0)}
    few, many = (
        DataLoader(Augmented(24, 100), shuffle=True, **options),
        DataLoader(Augmented(), shuffle=True, **options),
    )
    if name in ("min_size", "max_size_cycle", "sequential"):
        return CombinedLoader([few, many] if name == "sequential" else {"few": few, "many": many}, mode=name)
    if name == "iterable":
        return DataLoader(Stream(), **options)
    if name == "permutation":
        return DataLoader(Augmented(), sampler=PermutationSampler(SAMPLES, seed=3), **options)
    if name == "generator":
        return DataLoader(Augmented(), shuffle=True, generator=torch.Generator().manual_seed(5), **options)
    if name == "subclass":
        return Watched(Augmented(), shuffle=True, **options)
    return OWN_ITERATION.get(name, lambda loader: loader)(many)


def run(
    folder: str,
    kind: str = "shuffled",
    rows: int = 4,
    accumulate: int = 1,
    moment: str | None = None,
    step: int = 0,
    resume: str | None = None,
    interval: int | None = None,
    epochs: int = 3,
    task: type[Traced] = Traced,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train; to the end, or until it is broken off; `resume` is a path, or anything else for `broken.ckpt`."""
    torch.set_num_threads(1)
    outcome = Outcome()
    set_seed(11)
    trained = task(outcome.trace)
    path = resume if resume and os.path.isdir(resume) else str(Path(folder) / "broken.ckpt")
    average = Average()
    all_callbacks: list[Callback] = [average, *callbacks]
    if moment is not None:
        all_callbacks.append(BreakOff(moment, step, path))
    trainer = Trainer(
        accelerator=device(),
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        val_check_interval=interval,
        log_every_n_steps=3,
        logger=CSVLogger(folder, name="log", version=0),
        callbacks=all_callbacks,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic=True,
    )
    try:
        validation = DataLoader(Augmented(20), batch_size=5)
        trainer.fit(trained, make_loader(kind, rows), validation, resume=path if resume else None)
    except Broken:
        return outcome
    outcome.weights = {name: value.clone() for name, value in trained.state_dict().items()}
    outcome.validated = trained.validated
    outcome.average = average.weights
    outcome.values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    outcome.draws = random.random(), torch.rand(()).item()
    log = Path(folder) / "log" / "version_0" / "metrics.csv"
    outcome.rows = log.read_text().splitlines() if trainer.is_global_zero and log.exists() else []
    return outcome


def broken_and_resumed(folder: str, cases: list[dict[str, Any]]) -> list[tuple[Outcome, Outcome, Outcome]]:
    """For each case the whole run, the broken one and the resumed one, on however many processes this is one of."""
    results = []
    wholes: dict[str, Outcome] = {}
    for number, case in enumerate(cases):
        place = Path(folder) / str(number)
        whole_case = {name: value for name, value in case.items() if name not in ("moment", "step")}
        if (key := repr(sorted(whole_case.items()))) not in wholes:
            wholes[key] = run(str(place / "whole"), **whole_case)
        whole = wholes[key]
        broken = run(str(place / "broken"), **case)
        resumed = run(str(place / "broken"), **whole_case, resume="yes")
        results.append((whole, broken, resumed))
    return results
