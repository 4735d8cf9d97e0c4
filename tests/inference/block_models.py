"""Small models of blocks, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain import init_empty_weights


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Embeddings, blocks, a norm and a head that is tied to the embeddings; and a table that no checkpoint holds."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(10, width)
        self.register_buffer("table", torch.arange(width) / width, persistent=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.table
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def seeded(width: int = 16, depth: int = 4) -> Blocks:
    """A model with values."""
    torch.manual_seed(0)
    return Blocks(width, depth)


def empty(width: int = 16, depth: int = 4) -> Blocks:
    """The same without memory."""
    with init_empty_weights():
        return Blocks(width, depth)


def saved(model: nn.Module, path: Path) -> Path:
    """A safetensors file with what a model holds, tied weights once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            known.add(id(tensor))
            weights[name] = tensor.detach().contiguous()
    save_file(weights, path)
    return path
