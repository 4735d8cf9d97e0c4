"""What a training step computed with and returned is freed before a validation begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Callback, CombinedLoader, Task, Trainer
from tests.pool import run_in_processes
from tests.trainer.tasks import Stream, quiet, rows


class Remember(Task):
    """Holds nothing of its batches and outputs but weak references.

    Attributes:
        alive: For each validation, which of the tensors of training were alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.made: list[tuple[str, weakref.ref[Tensor]]] = []
        self.alive: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.first_of(batch)
        hidden = self.layer(x).square()
        loss = hidden.mean()
        parts = {"batch": x, "hidden": hidden, "loss": loss}
        self.made += [(f"{name} {batch_idx}", weakref.ref(each)) for name, each in parts.items()]
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "hidden": hidden}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = self.first_of(batch)
        self.made.append((f"validation {batch_idx}", weakref.ref(x)))
        self.log("val_loss", self.layer(x).square().mean())

    def first_of(self, batch: Any) -> Tensor:
        while not isinstance(batch, Tensor):
            batch = batch["a"] if isinstance(batch, dict) else batch[0]
        return batch

    def on_validation_start(self) -> None:
        self.alive.append([name for name, reference in self.made if reference() is not None])

    def on_train_epoch_start(self) -> None:
        assert [name for name, each in self.made if name.startswith("validation") and each() is not None] == []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SeesItsBatch(Callback):
    """Sees the batch wherever it is under way."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert trainer.batch is batch
        assert outputs["hidden"].shape == task.first_of(batch).shape
        self.seen += 1


class Made(torch.utils.data.IterableDataset[Any]):
    """Batches that are made as they are read."""

    def __iter__(self) -> Any:
        return (torch.ones(2, 1) for _ in range(4))


class Whole(torch.utils.data.Dataset[Any]):
    """Samples that are made one by one."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


LOADERS: dict[str, Callable[[], Any]] = {
    "in memory": lambda: rows([1.0] * 8, 2),
    "by the sample": lambda: DataLoader(Whole(), batch_size=2),
    "with workers": lambda: DataLoader(Whole(), batch_size=2, num_workers=1),
    "a sample at a time": lambda: DataLoader(Whole(), batch_size=None),
    "stream": lambda: DataLoader(Stream([1.0] * 8), batch_size=2),
    "stream of batches": lambda: DataLoader(Made(), batch_size=None),
    "ready batches": lambda: _Ready(),
    "several, side by side": lambda: {"a": rows([1.0] * 8, 2), "b": rows([1.0] * 8, 2)},
    "several, to the longest": lambda: CombinedLoader(
        {"a": rows([1.0] * 8, 2), "b": DataLoader(Stream([1.0] * 4), batch_size=2)}, "max_size_cycle"
    ),
    "several in turn": lambda: CombinedLoader([rows([1.0] * 4, 2), rows([1.0] * 4, 2)], "sequential"),
}


class _Ready:
    """Makes its batches as it is read, and has no length."""

    def __iter__(self) -> Any:
        return ([torch.ones(2, 1)] for _ in range(4))


def run(train: Any, **options: Any) -> Remember:
    task, sees = Remember(), SeesItsBatch()
    quiet(sees, max_epochs=2, **options).fit(task, train, rows([1.0] * 2))
    assert sees.seen >= 4
    return task


@pytest.mark.parametrize("kind", LOADERS)
def test_a_validation_in_the_middle_of_an_epoch_begins_without_the_tensors_of_training(kind: str) -> None:
    task = run(LOADERS[kind](), val_check_interval=2)
    assert len(task.alive) >= 2
    assert task.alive == [[]] * len(task.alive)


@pytest.mark.parametrize("kind", LOADERS)
def test_so_does_one_at_the_end_of_an_epoch(kind: str) -> None:
    assert run(LOADERS[kind]()).alive == [[], []]


@pytest.mark.parametrize("interval", [2, 4], ids=["middle", "end"])
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"precision": "bf16"},
        {"profiler": "simple"},
        {"enable_progress_bar": True},
        {"auto_micro_batch": True},
        {"gradient_clip_val": 0.1},
        {"overfit_batches": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_so_does_one_under(options: dict[str, Any], interval: int) -> None:
    task = run(rows([1.0] * 8, 2), val_check_interval=interval, **options)
    assert task.alive == [[]] * (8 // interval)


class ByHand(Remember):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.manual_backward(output["loss"])
        self.optimizers().step()
        self.optimizers().zero_grad()
        return output


class ByClosure(Remember):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)


class Skips(Remember):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


@pytest.mark.parametrize("kind", [ByHand, ByClosure, Skips])
def test_so_does_one_of_a_task_that(kind: type[Remember]) -> None:
    task, sees = kind(), SeesItsBatch()
    quiet(sees, max_epochs=2).fit(task, rows([1.0] * 8, 2), rows([1.0] * 2))
    assert task.alive == [[], []]


def alive_under_ddp() -> list[list[str]]:
    return run(rows([1.0] * 16, 2), val_check_interval=2, accumulate_grad_batches=2).alive


def test_so_does_one_on_several_processes() -> None:
    assert run_in_processes(alive_under_ddp, 2) == [[[], [], [], []]] * 2


def test_a_tensor_that_is_held_would_be_found() -> None:
    held: list[Any] = []

    class Holds(SeesItsBatch):
        def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
            held.append(batch)

    task = Remember()
    quiet(Holds()).fit(task, rows([1.0] * 2), rows([1.0]))
    assert task.alive == [["batch 0", "batch 1"]]


class Window(Remember):
    """Notes what of its step's earlier micro-batches is alive, and whether gradients are, where a forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.alive.append([name for name, reference in self.made if reference() is not None])
        self.gradients.append(self.layer.weight.grad is not None)
        return super().training_step(batch, batch_idx)


def test_micro_batches_hold_nothing_of_what_those_before_them_returned() -> None:
    task = Window()
    quiet(accumulate_grad_batches=4).fit(task, rows([1.0] * 8, 2))
    assert [[name for name in names if "batch" not in name] for names in task.alive] == [[]] * 4


def test_the_gradients_of_a_step_are_gone_before_the_next_forward() -> None:
    task = Window()
    quiet(accumulate_grad_batches=2).fit(task, rows([1.0] * 12, 2))
    assert task.gradients == [False, True] * 3
