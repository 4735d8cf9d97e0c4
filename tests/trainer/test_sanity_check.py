"""The sanity check leaves no trace: a run with it equals one without."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, DataModule, Task, Trainer
from tests.pool import run_in_processes
from tests.trainer.tasks import Shuffled, quiet


class Augmented(Dataset[Any]):
    """Noise, some of it drawn when a sample is read."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + self.own.random()
        x = self.x[index] + 0.1 * torch.randn(2)
        return x, x.sum(0, keepdim=True) + float(noise)


class Drawing(Shuffled):
    """Draws in its validation too, from the global generators and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(2)
        self.validated: list[float] = []
        self.checked = 0

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        noise = torch.rand(()) + random.random() + np.random.rand() + torch.rand((), generator=self.own)
        if self.trainer.sanity_checking:
            self.checked += 1
        else:
            self.validated.append(float(batch[0].sum() + noise))


class DrawingBefore(Callback):
    """Draws when the check begins."""

    def on_sanity_check_start(self, trainer: Trainer, task: Task) -> None:
        torch.rand(3)


class Splitting(DataModule):
    """Makes loaders of a random part of the data.

    Args:
        workers: how many, which stay.
        own: whether the validation loader has a generator.
    """

    def __init__(self, workers: int, own: bool) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        self.own = torch.Generator().manual_seed(4) if own else None

    def train_dataloader(self) -> Any:
        return DataLoader(Augmented(12), batch_size=2, shuffle=True)

    def val_dataloader(self) -> Any:
        part, _ = torch.utils.data.random_split(Augmented(16), [10, 6])
        return DataLoader(part, batch_size=2, shuffle=True, generator=self.own, **self.options)


def trained(sanity_steps: int, workers: int, own: bool) -> tuple[list[float], list[float]]:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    task = Drawing()
    trainer = quiet(DrawingBefore(), max_epochs=2, num_sanity_val_steps=sanity_steps)
    trainer.fit(task, datamodule=Splitting(workers, own))
    assert (task.checked > 0) == (sanity_steps != 0)
    return task.losses, task.validated


def with_and_without(workers: int, own: bool) -> list[Any]:
    return [trained(steps, workers, own) for steps in (0, 2, -1)]


@pytest.mark.parametrize("own", [False, True], ids=["global generators", "own generator"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("processes", [1, 2])
def test_training_does_not_depend_on_the_sanity_check(processes: int, workers: int, own: bool) -> None:
    for without, two_steps, all_steps in run_in_processes(with_and_without, processes, args=(workers, own)):
        assert two_steps == without
        assert all_steps == without
