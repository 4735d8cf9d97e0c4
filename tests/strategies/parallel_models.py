"""Small modules for tests of split layers and sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Colwise, Rowwise

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Attention that reshapes by a number from its configuration, as many models do."""

    def __init__(self, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        shape = (rows, length, self.num_heads, WIDTH // self.num_heads)
        q, k, v = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.wo(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(heads)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.attention(self.norm(x)))


class Tied(nn.Module):
    """Its head is its embedding, and its second block does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def heads_split(prefix: str = "") -> dict[str, Any]:
    """A plan for `Attention`, whose views are of whole numbers of heads."""
    return {
        **{f"{prefix}{name}": Colwise(use_local_output=False) for name in ("wq", "wk", "wv")},
        f"{prefix}wo": Rowwise(),
    }


def made(cls: Any, *args: Any) -> Any:
    """The same module on every process."""
    torch.manual_seed(5)
    return cls(*args)
