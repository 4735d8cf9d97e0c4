"""What the tests of XLA strategies share: the environment that gives a process XLA devices, and small runs there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer

FEATURES, HIDDEN, CLASSES = 8, 16, 4
EXACT = 5e-6


def environment(devices: int = 1) -> dict[str, str | None]:
    """Variables of a process with so many XLA devices on the CPU, whose compiler does not try hard."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "DRIVETRAIN_USE_CPU": None,
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def samples(count: int, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


def train_plain(data: TensorDataset, batch_size: int = 8, accumulate: int = 1) -> tuple[nn.Module, list[float]]:
    """Plain torch on the CPU: the model and the loss of each batch."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses = []
    for index, (x, y) in enumerate(DataLoader(data, batch_size)):
        loss = F.cross_entropy(model(x), y)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, losses


class Classifier(Task):
    """Logs a loss in each step, and predicts a row's class."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


def make_trainer(**options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{"accelerator": "xla", "max_epochs": 1, **quiet, **options})


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two states, which have the same names."""
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What a logger warns of in the body."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def answers(attempts: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """What becomes of each attempt: `"accepted"`, or the class and the text of what it raises."""
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "accepted"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
