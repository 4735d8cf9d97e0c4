"""The transformer that strategies are measured with: 30 million parameters, and what each strategy needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import Task

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 4096, 64, 512, 8, 8


@dataclass(frozen=True)
class Size:
    """Sizes of a transformer: tokens that it knows, tokens in a sequence, width, heads, blocks."""

    vocabulary: int = VOCABULARY
    length: int = LENGTH
    width: int = WIDTH
    heads: int = HEADS
    layers: int = LAYERS


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_size = width // heads

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm1(x)
        heads = (*x.shape[:2], -1, self.head_size)  # as many as this process has
        q, k, v = (layer(inside).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.output(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Transformer(nn.Module):
    """Tokens (rows, length) to logits (rows, length, vocabulary)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.zeros(size.length, size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        places = self.positions[: tokens.shape[1]] if positions is None else self.positions[positions]
        x = self.tokens(tokens) + places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(layers: int = LAYERS) -> Transformer:
    torch.manual_seed(0)
    return Transformer(Size(layers=layers))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def make_batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and those that follow them, both (rows, length)."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LanguageModel(Task):
    """The transformer as a task."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = layers

    def configure_model(self) -> None:
        self.model = make_model(self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets, *positions = batch
        return loss_of(self.model(tokens, *positions), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())


def tensor_parallel_plan() -> dict[str, Any]:
    """How the layers of the blocks are split, in torch's styles, which drivetrain's `Parallel` takes too."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan.update({f"blocks.*.{name}": RowwiseParallel() for name in ("output", "down")})
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return plan
