"""A small model, its task and its data for the tests of FSDP, and plain torch to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import FSDP, Accelerator, Task

# What sums in another order may differ by.
EXACT = 2e-6

WIDTH, CLASSES, ROWS = 8, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11 if tied else CLASSES, bias=False)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("table", torch.arange(WIDTH).float(), persistent=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.scale + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def net(**options: Any) -> Net:
    torch.manual_seed(5)
    return Net(**options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (count, 2 * ROWS, 5), generator=generator)
    return list(zip(tokens, torch.randint(0, CLASSES, (count, 2 * ROWS), generator=generator), strict=True))


def plain(make: Callable[[], nn.Module], steps: int = 3) -> dict[str, Tensor]:
    """Whole global batches in plain torch."""
    model = make()
    optimizer = adamw(model.parameters())
    for x, y in batches(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def prepared(make: Callable[[], nn.Module], strategy: FSDP, **options: Any) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(cpu=True, strategy=strategy, **options)
    with accelerator.init_context():
        model = make()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    rank = accelerator.process_index
    for x, y in batches(steps):
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x[mine]), y[mine]))
        optimizer.step()


def trained(make: Callable[[], nn.Module], strategy: FSDP) -> dict[str, Tensor]:
    """The same under FSDP, each process its half of the rows; whole tensors on every process."""
    accelerator, model, optimizer = prepared(make, strategy)
    train(accelerator, model, optimizer)
    return whole(accelerator, model)


def whole(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    state = accelerator.strategy.state.model(model)
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in state.items()}


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys(), set(one) ^ set(other)
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


class Scaled(nn.Module):
    """A scalar parameter, which has no dimension to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens) * self.temperature


class NetTask(Task):
    def __init__(self, skipped: int | None = None) -> None:
        super().__init__()
        self.net = net()
        self.extra = nn.Parameter(torch.ones(CLASSES))
        self.skipped = skipped

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens) * self.extra

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.trainer.global_rank == self.skipped:
            return None
        return F.cross_entropy(self.net(batch[0]) * self.extra, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.net(batch[0]) * self.extra, batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


def loader(rows: int = ROWS) -> DataLoader[Any]:
    tokens, labels = zip(*batches(3), strict=True)
    return DataLoader(TensorDataset(torch.cat(tokens), torch.cat(labels)), batch_size=rows)


def plain_task(epochs: int) -> dict[str, Tensor]:
    task = NetTask()
    optimizer = adamw(task.parameters())
    for _ in range(epochs):
        for x, y in loader(2 * ROWS):
            optimizer.zero_grad()
            F.cross_entropy(task(x), y).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in task.state_dict().items()}
