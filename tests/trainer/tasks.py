"""Small tasks, loaders and trainers for the tests of the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import Callback, Task, Tracker, Trainer
from tests.pool import device


def rows(values: Iterable[float], batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    """A loader of one-column batches; each batch is a list of one tensor of shape (rows, 1)."""
    column = torch.tensor(list(values), dtype=torch.float32)[:, None]
    return DataLoader(TensorDataset(column), batch_size=batch_size, **options)


def ones(count: int, batch_size: int = 1) -> DataLoader[Any]:
    return rows([1.0] * count, batch_size)


class Stream(IterableDataset[Any]):
    """The same values, of a length that nobody knows."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = [torch.tensor([value]) for value in values]

    def __iter__(self) -> Any:
        return iter(self.values)


def stream(values: Iterable[float], batch_size: int = 1) -> DataLoader[Any]:
    """A loader without a length."""
    return DataLoader(Stream(values), batch_size=batch_size)


class Weight(Task):
    """One weight `w`, and the loss `w * mean(x)`: its gradient is the mean of the batch.

    Args:
        lr: learning rate of SGD; 0 leaves the weight where it is.

    Attributes:
        gradients: the gradient at each optimizer step.
        batches: (epoch, batch_idx, first value) of each training batch.
    """

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.lr = lr
        self.w = nn.Parameter(torch.zeros(()))
        self.gradients: list[float] = []
        self.batches: list[tuple[int, int, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = batch[0] if isinstance(batch, list) else batch
        self.batches.append((self.current_epoch, batch_idx, float(x.flatten()[0])))
        return self.w * x.mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = batch[0] if isinstance(batch, list) else batch
        self.log("val_loss", x.mean())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.gradients.append(float(self.w.grad))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Shuffled(Task):
    """A small network on noise with dropout and Adam, in which every random number and every step counts."""

    def __init__(self, width: int = 4, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(0.25), nn.Linear(width, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    @staticmethod
    def data(generator: bool = False, count: int = 22, batch_size: int = 4) -> DataLoader[Any]:
        fixed = torch.Generator().manual_seed(1)
        x = torch.randn(count, 2, generator=fixed)
        y = x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=fixed)
        own = torch.Generator().manual_seed(5) if generator else None
        return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True, generator=own)


class Kept(Tracker):
    """A tracker that keeps what it is given.

    Attributes:
        lines: values with their step.
        configuration: hyper-parameters.
    """

    name = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.configuration: dict[str, Any] = {}

    def store_init_configuration(self, values: Any) -> None:
        self.configuration.update(values)

    def log(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.lines.append({**values, "step": step})


class Count(Callback):
    """How often hooks were called, and at which global step.

    Args:
        *hooks: the names to count; each takes any arguments.
    """

    def __new__(cls, *hooks: str) -> Any:
        def counting(name: str) -> Callable[..., None]:
            def hook(self: Any, trainer: Trainer, task: Task, *arguments: Any) -> None:
                self.steps[name].append(trainer.global_step)

            return hook

        return object.__new__(type("Count", (cls,), {name: counting(name) for name in hooks}))

    def __init__(self, *hooks: str) -> None:
        self.steps: dict[str, list[int]] = {name: [] for name in hooks}

    def __getitem__(self, hook: str) -> int:
        return len(self.steps[hook])


def quiet(callbacks: Sequence[Callback] | Callback | None = None, **options: Any) -> Trainer:
    """A trainer on the CPU with nothing around the loop but what is asked for."""
    settings: dict[str, Any] = {
        "accelerator": device(),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
    }
    return Trainer(**{**settings, **options})


def fitted(task: Task, train: Any, val: Any = None, **options: Any) -> Trainer:
    """Fit a task with a quiet trainer."""
    trainer = quiet(**options)
    trainer.fit(task, train, val)
    return trainer
