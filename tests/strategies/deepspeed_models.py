"""A small model, its task, its data and a loop over it for the tests of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, DataLoaderConfiguration, Task, Trainer, gather_object
from tests.strategies.quiet import quiet_trainer

NEEDS_DEEPSPEED = [
    pytest.mark.sharded,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="deepspeed is missing: pip install 'drivetrain[deepspeed]'"
    ),
]

# What sums in another order may differ by.
EXACT = 2e-6

STAGES = (0, 1, 2, 3)
ROWS = 4


class Net(nn.Module):
    """A frozen layer, tied weights, a buffer that forwards change, and sizes that no number of processes divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(F.gelu(self.head(self.norm(F.gelu(self.frozen(self.embed(x)))))))


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def data(steps: int, world: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(ROWS * world * steps, 7, generator=generator)
    return TensorDataset(x, torch.randint(0, 5, (len(x),), generator=generator))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class Loop:
    """A plain loop over an Accelerator: two groups of parameters, a schedule, clipping."""

    def __init__(self, strategy: Any, precision: str = "no", steps: int = 6) -> None:
        resuming = DataLoaderConfiguration(use_stateful_dataloader=True)  # within an epoch
        self.accelerator = Accelerator(
            cpu=True, strategy=strategy, mixed_precision=precision, dataloader_config=resuming
        )
        model = net()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            [{"params": trained[:2], "weight_decay": 0.0}, {"params": trained[2:]}], lr=1e-2, weight_decay=0.1
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        rows = ROWS * 2 // self.accelerator.num_processes
        loader = DataLoader(data(steps), batch_size=rows)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )

    def train(self, steps: int) -> Loop:
        for _, (x, y) in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            self.accelerator.backward(F.cross_entropy(self.model(x).float(), y))
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        """Whole, on all processes."""
        state = self.accelerator.strategy.state.model(self.model)
        parts = gather_object([{name: value for name, value in state.items() if not value.is_meta}])
        return {name: next(part[name] for part in parts if name in part).detach().clone() for name in state}


class NetTask(Task):
    def __init__(self, optimizer: Callable[[nn.Module], Any] = adamw, build: bool = True) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.net = net() if build else None
        self.partitioned: list[bool] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = net()
            self.partitioned = [hasattr(p, "ds_id") for p in self.net.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net)


def fitted(strategy: Any, task: Task | None = None, **options: Any) -> tuple[Trainer, dict[str, Tensor]]:
    one = quiet_trainer(strategy, **options)
    one.fit(task or NetTask(), DataLoader(data(4), batch_size=ROWS))
    return one, whole_weights(one)


def whole_weights(one: Trainer) -> dict[str, Tensor]:
    """Of rank 0, on all processes."""
    state: dict[str, Tensor] = gather_object([one.strategy.state.model(one.model, full=True)])[0]
    return state


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def assert_all_below(gaps: dict[Any, float], limit: float) -> None:
    assert {name: gap for name, gap in gaps.items() if not gap <= limit} == {}
