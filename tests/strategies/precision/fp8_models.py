"""A small model of several kinds of layers, its task and its data, for the tests of FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task

WIDTH = 32


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class Named(nn.Linear):
    """A subclass that computes as `nn.Linear` does."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = Named(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between a first and a last layer, and a layer whose sizes do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.odd = nn.Linear(WIDTH, 40)
        self.back = nn.Linear(40, WIDTH)
        self.last = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x + self.back(F.gelu(self.odd(x))))


FLOAT8 = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
MISFITS = "odd (32 to 40), back (40 to 32)"


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class NetTask(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.net.parameters())


def loader(batch_size: int = 16, samples: int = 64) -> Any:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(samples, 16, generator=generator)
    return DataLoader(TensorDataset(x, x.flip(1)), batch_size=batch_size, shuffle=True, generator=generator)


def float8_layers(model: nn.Module) -> list[str]:
    """The names of the layers that compute in 8-bit floats."""
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Layer"]
